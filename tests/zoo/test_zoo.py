"""Models of diffusers and transformers, as published, give eager PyTorch's numbers when ported.

Contents:
    outputs    every case against eager: structure, types, dtypes, numbers
    gradients  of all trainable parameters, for the cases that ask for it
    refusals   a PortError that names the line
    training   dropout under a key; models that draw random numbers in their forward
    padding    rows that see nothing
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import tpuport
from tests.zoo.case import Case, keep
from tests.zoo.diffusers_models import DIFFUSERS, RANDOM, REFUSED
from tests.zoo.transformers_models import TRANSFORMERS
from tpuport import PortError

CASES = [*DIFFUSERS, *TRANSFORMERS]

# Of these every line of the package that they run is run by the others (measured).
LIKE_OTHERS = {
    *("AuraFlowTransformer2DModel", "BriaFiboTransformer2DModel", "Krea2Transformer2DModel"),
    *("SD3Transformer2DModel", "HunyuanVideo15Transformer3DModel-no_image"),
    *("WanVACETransformer3DModel", "UNet2DModel", "UNet2DModel-decoder_of_ConsistencyDecoderVAE"),
    *("UNet3DConditionModel", "UNetMotionModel", "ControlNetModel", "AsymmetricAutoencoderKL"),
    *("AutoencoderDC", "AutoencoderKLTemporalDecoder", "InternVLModel"),
}
# The gradients of these take the longest. Their outputs are compared, and AutoencoderTiny and
# Wav2Vec2Model have convolutions, PixArtTransformer2DModel and FluxTransformer2DModel such blocks.
LONG_GRADIENTS = {
    *("UNet2DConditionModel", "HunyuanVideo15Transformer3DModel-image", "AutoencoderKL"),
    *("MochiTransformer3DModel", "ZImageTransformer2DModel", "Lumina2Transformer2DModel"),
    "WanTransformer3DModel",
}


def some(cases: list[Case], slow: set[str]) -> list[Any]:
    """All cases, those with the names of `slow` for `make test-all`."""
    assert slow <= {case.name for case in cases}
    return [pytest.param(case, marks=[pytest.mark.slow] * (case.name in slow)) for case in cases]


pytestmark = [
    # Eager's unfused flex attention, which a reference without torch.compile runs on purpose.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    # Mochi's attention pooling asks for an autocast to float32, which does nothing on a CPU.
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype:UserWarning"),
    # diffusers' own models use what diffusers has deprecated for others.
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`Transformer2DModelOutput` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
]


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """What is directly inside a container or an object, each part with the path step to it."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, (type, torch.dtype, torch.device, torch.nn.Module)) or callable(value):
        return []
    return (
        [(f".{name}", item) for name, item in sorted(vars(value).items())]
        if hasattr(value, "__dict__")
        else []
    )


def compare(
    got: Any, want: Any, rtol: float, path: str = "out", seen: set[int] | None = None
) -> list[str]:
    """Check `got` against eager's `want`, type by type down to the tensors.

    Gives the paths of the tensors.
    """
    seen = set() if seen is None else seen
    assert type(got) is type(want), f"{path}: {type(got)}, eager {type(want)}"
    if isinstance(want, torch.Tensor):
        compare_tensors(got, want, rtol, path)
        return [path]
    if id(want) in seen:
        return []
    seen.add(id(want))
    ours, theirs = parts_of(got), parts_of(want)
    assert [step for step, _ in ours] == [step for step, _ in theirs], f"{path}: other contents"
    if not theirs and isinstance(want, (bool, int, float, str)):
        assert got == want, f"{path}: {got}, eager {want}"
    return [
        leaf
        for (step, a), (_, b) in zip(ours, theirs, strict=True)
        for leaf in compare(a, b, rtol, path + step, seen)
    ]


def compare_tensors(got: torch.Tensor, want: torch.Tensor, rtol: float, path: str) -> None:
    """Equal shape and dtype.

    Equal integers; NaN and infinity at the same places; close elsewhere.
    """
    assert got.shape == want.shape, f"{path}: shape {tuple(got.shape)}, eager {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{path}: {got.dtype}, eager {want.dtype}"
    if not want.is_floating_point():
        assert torch.equal(got, want), f"{path}: {got}, eager {want}"
        return
    finite = want.isfinite()
    assert torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()), f"{path}: not finite"
    assert torch.equal(got.isfinite(), finite), f"{path}: finite elsewhere"
    got, want = got[finite].double(), want[finite].double()
    if want.numel():
        error, size = float((got - want).abs().max()), float(want.abs().max())
        assert error <= rtol * size, f"{path}: off by {error:.2e} of {size:.2e}"


@contextlib.contextmanager
def plain_pytorch() -> Iterator[None]:
    """Eager PyTorch without gradients.

    Flex attention compiles itself, which is slow and not under test.
    """
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("case", some(CASES, LIKE_OTHERS), ids=str)
def test_outputs_are_eagers(case: Case) -> None:
    model, kwargs = case.make()
    with plain_pytorch():
        want = model(**kwargs)
    model, given = case.make()
    got = tpuport.convert(model, verify=False)(**given)
    assert compare(tpuport.to_torch(got), want, case.rtol), "the output holds no tensor"
    # Caches among the arguments are written in place.
    compare(tpuport.to_torch(given), kwargs, case.rtol, "arguments")


def floating(value: Any, seen: set[int] | None = None) -> list[Any]:
    """The floating tensors or arrays in an output, in the order of `parts_of`."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, jax.Array):
        return [value] if jnp.issubdtype(value.dtype, jnp.floating) else []
    if id(value) in seen:
        return []
    seen.add(id(value))
    return [leaf for _, part in parts_of(value) for leaf in floating(part, seen)]


def weighted(leaves: list[Any], weights: list[torch.Tensor], array: Any) -> Any:
    """One number of all floating outputs, each element with a weight of its own."""
    return sum((leaf * array(w)).sum() for leaf, w in zip(leaves, weights, strict=True))


def draws(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(leaf.shape, generator=generator) for leaf in leaves]


@pytest.mark.parametrize(
    "case", some([case for case in CASES if case.grads], LONG_GRADIENTS), ids=str
)
def test_gradients_are_autograds(case: Case) -> None:
    model, kwargs = case.make()
    leaves = floating(model(**copy.deepcopy(kwargs)))
    weights = draws(leaves)
    weighted(leaves, weights, lambda w: w).backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    ported = tpuport.convert(case.make()[0], verify=False)

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        out, _ = ported.apply(params, ported.buffers, jax.random.key(0), **kwargs)
        return weighted(floating(out), weights, lambda w: jnp.asarray(w.numpy()))

    with jax.default_matmul_precision("highest"):
        got = jax.jit(jax.grad(loss))(ported.params)
    assert set(got) == set(want)
    assert any(grad is not None and grad.abs().max() > 0 for grad in want.values())
    largest = max(float(grad.abs().max()) for grad in want.values() if grad is not None)
    for name, grad in want.items():
        have = torch.from_numpy(jax.device_get(got[name]).copy())
        grad = torch.zeros_like(have) if grad is None else grad
        error, size = float((have - grad).abs().max()), float(grad.abs().max())
        # A sum that cancels to nothing has the rounding of its terms, which are as large as others.
        limit = max(case.rtol * size, 1e-6 * largest)
        assert error <= limit, f"gradient of {name}: off by {error:.2e} of {size:.2e}"


@pytest.mark.parametrize(("case", "line"), REFUSED, ids=[str(case) for case, _ in REFUSED])
def test_a_model_that_cannot_be_ported_is_refused_at_its_line(case: Case, line: str) -> None:
    model, kwargs = case.make()
    with pytest.raises(PortError) as refusal:
        tpuport.convert(model, verify=False)(**kwargs)
    assert refusal.value.source_line is not None
    assert line in refusal.value.source_line


# Classes with dropout, and how their configurations name it.
DROPOUT = {
    "BertModel": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
    "PixArtTransformer2DModel": {"dropout": 0.2},
}


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_in_training_is_drawn_from_the_key(name: str) -> None:
    case = case_of(name)
    model, kwargs = case.make(**DROPOUT[name])
    ported = tpuport.convert(model.train(), verify=False)

    @jax.jit
    def run(key: jax.Array) -> list[jax.Array]:
        return floating(ported.apply(ported.params, ported.buffers, key, **kwargs)[0])

    first, again, other = (run(jax.random.key(seed))[0] for seed in (1, 1, 2))
    assert jnp.isfinite(first).all()
    assert jnp.array_equal(first, again)
    assert not jnp.allclose(first, other, rtol=1e-3)
    with plain_pytorch():
        undropped = floating(model.eval()(**kwargs))[0]
    assert not jnp.allclose(first, jnp.asarray(undropped.numpy()), rtol=1e-3)


@pytest.mark.parametrize("case", RANDOM, ids=str)
def test_random_numbers_of_a_forward_follow_the_seed(case: Case) -> None:
    model, kwargs = case.make()
    # The numbers are jax's own, so eager is run on the same ones: that is convert's verification.
    ported = tpuport.convert(model, kwargs=kwargs, rtol=case.rtol)
    torch.manual_seed(3)
    first, second = (tpuport.to_torch(ported(**kwargs)).sample for _ in range(2))
    torch.manual_seed(3)
    again = tpuport.to_torch(ported(**kwargs)).sample
    assert first.isfinite().all()
    assert torch.equal(first, again)
    assert not torch.allclose(first, second, rtol=1e-3)


# A sample that is padding from end to end, beside one that is padded on the left.
NOTHING_TO_SEE = {"attention_mask": keep(0, 4, size=7, left=True)}
HIDDEN_TEXT = {"encoder_attention_mask": keep(0, 5, size=7, left=True)}
MASKED = {
    "LlamaForCausalLM": NOTHING_TO_SEE,
    "Qwen2Model": NOTHING_TO_SEE,
    "GptOssModel": NOTHING_TO_SEE,
    "BloomModel": NOTHING_TO_SEE,
    "MambaModel": NOTHING_TO_SEE,
    "BertModel": NOTHING_TO_SEE,
    "DebertaV2Model": NOTHING_TO_SEE,
    "PixArtTransformer2DModel": HIDDEN_TEXT,
    "MochiTransformer3DModel": {
        "encoder_attention_mask": HIDDEN_TEXT["encoder_attention_mask"].bool()
    },
}


# In Mochi's, which takes the longest, the same functions see nothing as in the others.
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("Mochi")) for n in MASKED],
)
def test_rows_that_see_nothing_are_eagers(name: str) -> None:
    case = case_of(name)
    model, kwargs = case.make()
    with plain_pytorch():
        want = model(**kwargs | MASKED[name])
    got = tpuport.to_torch(tpuport.convert(model, verify=False)(**kwargs | MASKED[name]))
    assert compare(got, want, case.rtol), "the output holds no tensor"
