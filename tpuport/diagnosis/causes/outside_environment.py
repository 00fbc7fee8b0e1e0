"""A torchax tensor is used outside of torchax's environment."""

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded

_PROBLEM = "a tensor of torchax is used outside of torchax's environment"


class OutsideEnvironment(Cause):
    """A torchax tensor is used where torchax's environment is not active.

    torchax answers torch functions inside `with torchax.default_env():` only, or after
    `torchax.enable_globally()`. Its tensors outlive the block.
    """

    RECORDED = (
        Recorded(
            "builtins.AssertionError",
            "torchax Tensors can only do math within the torchax environment.Please wrap your code"
            " with `with torchax.default_env()` or call torchax.enable_globally() before.",
            'a tensor made with `device="jax"` and added to after the block',
            _PROBLEM,
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain torchax's own assertion, recognized by its text."""
        if not raised.says("within the torchax environment"):
            return None
        return Explanation(
            _PROBLEM,
            (
                "turn results into CPU tensors where they leave the block: tpuport.to_torch(y)",
                "or run the code inside `with torchax.default_env():`",
            ),
        )
