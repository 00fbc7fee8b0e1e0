"""The errors that tpuport raises on purpose. Each message says what is wrong and what to do."""

# Package that `pip install tpuport` leaves out -> the extra that installs it.
EXTRA_OF_PACKAGE = {
    "jax": "jax",
    "jaxlib": "jax",
    "numpy": "jax",
    "optax": "jax",
    "torch": "jax",
    "torchax": "jax",
    "libtpu": "tpu",
    "libcst": "migrate",
    "lsprotocol": "lsp",
    "mcp": "mcp",
    "pygls": "lsp",
    "av": "recipes",
    "diffusers": "recipes",
    "einops": "recipes",
    "safetensors": "jax",
    "transformers": "recipes",
}


class TpuportError(Exception):
    """Base of all errors that tpuport raises on purpose."""


class PortError(TpuportError):
    """Code that cannot be ported without changing what it computes.

    Args:
        message: What is wrong, in one sentence.
        code: The rule's code, such as `TPU101`, if a rule found it.
        file: The user's file.
        line: The line in that file, counted from 1.
        source_line: The code on that line.
        remedy: What the user can do about it, in the imperative.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        file: str | None = None,
        line: int | None = None,
        source_line: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.file = file
        self.line = line
        self.source_line = source_line
        self.remedy = remedy

    def __str__(self) -> str:
        place = None
        if self.file is not None:
            place = self.file if self.line is None else f"{self.file}:{self.line}"
        what = self.message if self.code is None else f"{self.code} {self.message}"
        lines = [what if place is None else f"{place}: {what}"]
        if self.source_line is not None:
            lines.append(f"    {self.source_line.strip()}")
        if self.remedy is not None:
            lines.append(f"What to do: {self.remedy}")
        return "\n".join(lines)


class ParityError(PortError):
    """A ported model whose outputs or gradients differ from eager PyTorch's."""


class UsageError(TpuportError, ValueError):
    """A wrong call: an argument that is missing, of the wrong kind, or cannot be honoured."""


class SignatureError(UsageError, TypeError):
    """A call with a missing, unknown or repeated argument, for which Python raises `TypeError`."""


class CheckpointError(TpuportError, ValueError):
    """A file of weights that cannot be read or written; no partly written file is left behind."""


class MissingExtraError(TpuportError, ImportError):
    """A feature whose packages are not installed.

    Args:
        feature: The name of the feature, such as `tpuport.convert`.
        package: The package that is missing.
        extra: The extra of tpuport that installs it.
    """

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs {package}, which is not installed. "
            f'What to do: pip install "tpuport[{extra}]"',
            name=package,
        )
        # Pickle rebuilds an exception from `args`, so they must be those of `__init__`.
        self.args = (feature, package, extra)
        self.feature = feature
        self.package = package
        self.extra = extra

    @classmethod
    def from_import(cls, feature: str, error: ModuleNotFoundError) -> "MissingExtraError | None":
        """Make the error for a failed import, or return None if no extra has that module."""
        package = (error.name or "").partition(".")[0]
        extra = EXTRA_OF_PACKAGE.get(package)
        return None if extra is None else cls(feature, package, extra)
