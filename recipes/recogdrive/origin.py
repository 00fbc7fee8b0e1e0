"""The model and the settings that a cache's hidden states come from."""

from pathlib import Path

from recipes.recogdrive.layouts import find_entries
from recipes.records import check_record, digest_of

RECORD = "cache.json"
# Files of a tokenizer, as transformers writes them.
_TOKENIZER = ("tokenizer*", "vocab*", "merges*", "added_tokens*", "special_tokens*")


def check_origin(
    root: str | Path,
    model: str | Path,
    *,
    max_length: int,
    max_dynamic_patch: int,
    dtype: str,
    upstream: bool,
) -> None:
    """Raise `UsageError` if a cache has tokens of another model or other settings.

    A new cache gets its record, `cache.json` at its root.

    Args:
        root: Folder of the cache.
        model: Folder of the model and its tokenizer.
        max_length: Length to which prompts are padded.
        max_dynamic_patch: Maximum number of tiles of an image.
        dtype: Dtype of the computation.
        upstream: Whether upstream's own model computes.
    """
    root, model = Path(root), Path(model)
    values = {
        "config": digest_of([model / "config.json"]),
        "weights": digest_of([*model.glob("*.safetensors"), *model.glob("*.bin")]),
        "tokenizer": digest_of([path for name in _TOKENIZER for path in model.glob(name)]),
        "max_length": max_length,
        "max_dynamic_patch": max_dynamic_patch,
        "dtype": dtype,
        "computed_by": "upstream" if upstream else "transformers",
    }
    check_record(
        root / RECORD,
        values,
        begun=root.is_dir() and bool(find_entries(root)),
        what_to_do="give the flags that the cache was begun with, or another --cache_path",
    )
