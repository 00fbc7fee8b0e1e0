"""`ported.generate`: transformers prepares the call, and two programs choose the tokens."""

import inspect
import sys
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.pytree.clone import clone_module
from tpuport.foundation.pytree.held import Held
from tpuport.generation.structures import described, taken_apart
from tpuport.tracing.core.export import to_torch

PREFIX = "_generate_"
# What an encoder reads of the generation config.
_OF_ENCODER = ("output_attentions", "output_hidden_states")
_REFUSED = {
    "streamer": "read the tokens when generate returns",
    "assistant_model": "generate without an assistant: the tokens are the same",
    "custom_generate": "leave it out",
    "inputs_embeds": "pass input_ids",
    "prefix_allowed_tokens_fn": "forbid tokens by bad_words_ids or suppress_tokens",
    "past_key_values": "pass the whole prompt",
    "tokenizer": "stop at tokens by eos_token_id, and cut the text afterwards",
}


def is_transformers(target: Any) -> bool:
    """Return whether the `generate` of a module is transformers' own, not a model's override."""
    utils = sys.modules.get("transformers.generation.utils")
    if utils is None or not isinstance(target, torch.nn.Module):
        return False
    mixin, kind = utils.GenerationMixin, type(target)
    return all(getattr(kind, n, None) is getattr(mixin, n) for n in ("generate", "_sample"))


def is_around_transformers(target: Any) -> bool:
    """Return whether a model overrides `generate` by code around calls of transformers' own."""
    utils = sys.modules.get("transformers.generation.utils")
    if utils is None or not isinstance(target, utils.GenerationMixin):
        return False
    mixin, kind = utils.GenerationMixin, type(target)
    above = kind.__mro__[: kind.__mro__.index(mixin)]
    own = [value for cls in above for value in vars(cls).values()]
    codes = [inspect.unwrap(f).__code__ for f in own if isinstance(f, FunctionType)]
    calls = any({"super", "generate"} <= {*code.co_names} for code in codes)
    return calls and kind.generate is not mixin.generate and kind._sample is mixin._sample


def run_part(ported: Any, method: str, args: tuple[Any, ...]) -> Any:
    """Run one of the programs of a generation."""
    return ported._run(method, args, {})[0]


class TextGeneration:
    """The method `generate` of a ported model.

    Args:
        ported: The `PortedModel`.
        run: Runs one of its programs: it is given the model, the name of a method and arguments.
        is_around: Whether the model has code of its own around transformers' `generate`. It runs on
            the host.
    """

    def __init__(
        self,
        ported: Any,
        run: Callable[[Any, str, tuple[Any, ...]], Any] = run_part,
        *,
        is_around: bool = False,
    ) -> None:
        from tpuport.generation import programs

        self._loops = 0
        self._ported, self._run_method, self._is_around = ported, run, is_around
        self._kept: _HostCopy | None = None
        for function in (programs.encode, programs.prefill, programs.decode, programs.whole):
            ported._tracer.functions[PREFIX + function.__name__] = function

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Generate as transformers does.

        Raises:
            UsageError: An argument asks for what the programs cannot do.
        """
        model = self._model()
        given = inspect.signature(model.generate).bind(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        for name, remedy in _REFUSED.items():
            if given.get(name) is not None:
                raise _refused(f"{name}=", remedy)
        for one in given.get("logits_processor") or ():
            if not type(one).__module__.startswith("transformers."):
                raise _refused(
                    f"the logits processor {type(one).__name__}", "use those of transformers"
                )
        self._loops = 0
        if self._is_around:
            return model.generate(*args, **kwargs)
        return model.generate(*args, **kwargs, custom_generate=self._decoding)

    def _around(self, kind: Any) -> type:
        """Return the class of a model whose `generate` finds our programs in transformers' own."""
        generation = self

        class Around(kind):  # type: ignore[misc]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return to_torch(generation._run("whole", args, kwargs))

            @staticmethod
            def _sample(*args: Any, **kwargs: Any) -> Any:
                return to_torch(generation._decoding(*args, **kwargs))

            @staticmethod
            def _beam_search(*args: Any, **kwargs: Any) -> Any:
                raise _refused("the generation mode 'beam_search'", "use greedy search or sampling")

        Around.__name__ = kind.__name__
        return Around

    def _model(self) -> Any:
        """Return a copy of the module for transformers' preparations on the host.

        It is that of the last call, unless the module or the copy has changed since.
        """
        module, kept = self._ported._module, self._kept
        if kept is None or not kept.is_of(module):
            self._kept = None
            self._kept = kept = _HostCopy(module, self._copied(module))
        return kept.copy

    def _copied(self, module: torch.nn.Module) -> Any:
        model: Any = clone_module(module, lambda tensor: tensor)[0]
        if model.training:
            raise UsageError(
                "generate on a model in training mode: dropout would draw other numbers than"
                " sampling in eager PyTorch; call ported.eval() first"
            )
        # Without an encoder of text, images are encoded in the pass over the prompt.
        is_text = model.config.is_encoder_decoder
        prepare = self._encoded if is_text else lambda inputs, given, *rest: given
        model._maybe_prepare_encoder_kwargs_for_generation = prepare
        for one in model.modules():
            one.register_forward_pre_hook(_refuse_on_host)
        if self._is_around:
            model.__class__ = self._around(type(model))
        return model

    def _run(self, name: str, *args: Any) -> Any:
        return self._run_method(self._ported, PREFIX + name, args)

    def _refuse_draws(self, *, is_sampled: bool) -> None:
        """Refuse to compare a second loop that draws: eager would draw other numbers."""
        self._loops += 1
        if is_sampled and self._loops > 1 and self._ported._verifying:
            raise _refused(
                "sampling in several loops, as for several segments of audio,",
                "pass verify=False to convert: eager PyTorch draws other numbers",
            )

    def _encoded(
        self, inputs: Any, given: dict[str, Any], name: Any, generation_config: Any
    ) -> Any:
        if given.get("encoder_outputs") is None:
            # Not the entire config: the lengths in it would need a program each.
            returned = {n: getattr(generation_config, n) for n in _OF_ENCODER}
            outputs = self._run("encode", inputs, given, name, returned)
            given = {**given, "encoder_outputs": outputs}
        return given

    def _decoding(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **given: Any,
    ) -> Any:
        """Choose the tokens; transformers calls this in place of its own loop."""
        given = {name: v for name, v in given.items() if name not in ("synced_gpus", "streamer")}
        eos = _ends(stopping_criteria)
        _refuse_config(generation_config)
        self._refuse_draws(is_sampled=bool(generation_config.do_sample))
        from tpuport.generation.timestamps import without_lists

        logits_processor = without_lists(logits_processor)
        limit, prompt = int(generation_config.max_length), input_ids.shape[1]
        cache_name = "past_key_values"
        if "mamba" in type(model).__name__.lower():
            cache_name = "cache_params"
        given.pop(cache_name, None)
        length = bucketed(limit)
        logits, *arguments = self._run("prefill", input_ids, given, cache_name, length)
        processing = taken_apart(logits_processor, described(logits_processor))
        room = input_ids.new_zeros((input_ids.shape[0], length - prompt))
        ids, count = self._run(
            "decode",
            logits,
            torch.cat([input_ids, room], dim=1),
            (torch.tensor(prompt), torch.tensor(limit)),
            tuple(arguments),
            processing,
            (eos, generation_config._pad_token_tensor if eos is not None else None),
            bool(generation_config.do_sample),
        )
        return ids[:, : int(to_torch(count))]


class _HostCopy:
    """A copy of a module, on which transformers prepares calls.

    Args:
        module: The module.
        copy: The copy.
    """

    def __init__(self, module: torch.nn.Module, copy: Any) -> None:
        self.copy, self._module = copy, weakref.ref(module)
        self._held = (Held(module), Held(copy))

    def is_of(self, module: torch.nn.Module) -> bool:
        """Return whether it is still a copy of this module: neither of both has changed."""
        return self._module() is module and all(held.are_same() for held in self._held)


def _refuse_on_host(module: torch.nn.Module, inputs: Any) -> None:
    """Refuse a preparation that computes with weights: those on the host are not the port's."""
    del inputs
    raise _refused(
        f"a model that calls {type(module).__name__} before its tokens are chosen",
        "call that layer in forward",
    )


def bucketed(length: int) -> int:
    """Return the room for a sequence: of a few sizes, so that close lengths share programs."""
    step = max(64, 1 << max(length.bit_length() - 3, 0))
    return -(-length // step) * step


def _ends(criteria: Any) -> torch.Tensor | None:
    """Return the tokens that end a sequence."""
    found = None
    for one in criteria:
        name = type(one).__name__
        if name == "EosTokenCriteria":
            found = one.eos_token_id
        elif name != "MaxLengthCriteria":
            raise _refused(
                f"the stopping criterion {name}", "stop at tokens by eos_token_id, or at a length"
            )
    return found


def _refuse_config(config: Any) -> None:
    mode = config.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        raise _refused(f"the generation mode {mode.value!r}", "use greedy search or sampling")
    if config.guidance_scale not in (None, 1) or config.watermarking_config is not None:
        raise _refused("guidance_scale= or watermarking_config=", "leave it out")
    if config.prefill_chunk_size is not None:
        raise _refused("prefill_chunk_size=", "leave it out")
    for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"):
        if getattr(config, name):
            raise _refused(f"{name}=", "use repetition_penalty")
    if config.use_cache is False:
        raise _refused("use_cache=False", "leave it out: the tokens are the same")
    if config.return_dict_in_generate:
        raise _refused("return_dict_in_generate=True", "leave it out")


def _refused(what: str, remedy: str) -> UsageError:
    return UsageError(
        f"{what} is not supported by generate as a program. What to do: {remedy}; or call"
        " generate of ported.to_torch(), in eager PyTorch"
    )
