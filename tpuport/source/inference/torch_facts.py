"""Tables of what PyTorch's names mean, for code that is read and not run."""

# Attributes of a tensor that are static while tracing.
HOST_ATTRIBUTES = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "is_leaf",
        "is_cuda",
        "is_sparse",
        "is_quantized",
        "is_meta",
        "is_mkldnn",
        "itemsize",
        "nbytes",
        "training",
    }
)
HOST_METHODS = frozenset(
    {
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "is_contiguous",
        "type",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "get_device",
        "ndimension",
        "is_conj",
        "storage_offset",
        "data_ptr",
        "is_inference",
        "is_same_size",
    }
)
HOST_BUILTINS = frozenset({"isinstance", "issubclass", "hasattr", "callable", "len", "type", "id"})
HOST_TORCH = frozenset(
    {
        "is_tensor",
        "is_floating_point",
        "is_complex",
        "numel",
        "is_grad_enabled",
        "device",
        "finfo",
        "iinfo",
        "Size",
        "get_default_dtype",
        "is_autocast_enabled",
        "result_type",
        "promote_types",
        "can_cast",
        "is_inference_mode_enabled",
        "Generator",
        "dtype",
        "broadcast_shapes",
        "no_grad",
        "enable_grad",
        "set_grad_enabled",
        "inference_mode",
        "autocast",
        "compile",
        "load",
        "save",
        "manual_seed",
        "get_autocast_gpu_dtype",
    }
)
HOST_TORCH_PACKAGES = (
    "torch.cuda.",
    "torch.jit.",
    "torch.compiler.",
    "torch.backends.",
    "torch._",
    "torch.distributed.",
    "torch.utils.",
    "torch.version.",
    "torch.xpu.",
    "torch.mps.",
    "torch.hub.",
    "torch.profiler.",
    "torch.onnx.",
    "torch.fx.",
    "torch.testing.",
)
# Their values come from the program's random key.
RANDOM_TORCH = frozenset(
    {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "normal"}
)
# Made of Python numbers: concrete while tracing, unless they are created on the traced device.
CREATION_TORCH = frozenset(
    {
        "arange",
        "as_tensor",
        "empty",
        "eye",
        "from_numpy",
        "full",
        "hann_window",
        "linspace",
        "hamming_window",
        "logspace",
        "ones",
        "tensor",
        "tril_indices",
        "triu_indices",
        "zeros",
    }
)
# Pseudo method of what is given to a function of torch.nn.functional, which takes tensors.
TENSOR_GIVEN = "F()"
# A parameter with one of these is a tensor: neither lists, dicts nor numbers have them.
TENSOR_METHODS = frozenset(
    {
        TENSOR_GIVEN,
        "abs",
        "all",
        "amax",
        "amin",
        "any",
        "argmax",
        "bool",
        "chunk",
        "clamp",
        "contiguous",
        "detach",
        "dim",
        "expand",
        "flatten",
        "float",
        "item",
        "long",
        "masked_fill",
        "max",
        "mean",
        "min",
        "norm",
        "permute",
        "repeat",
        "reshape",
        "shape",
        "softmax",
        "squeeze",
        "std",
        "sum",
        "to",
        "transpose",
        "unsqueeze",
        "view",
    }
)
# A parameter with one of these is no tensor: it is a list, a dict, text, an image or a module.
OTHER_METHODS = frozenset(
    {
        "append",
        "convert",
        "crop",
        "endswith",
        "extend",
        "get",
        "height",
        "items",
        "join",
        "keys",
        "lower",
        "mode",
        "pop",
        "resize",
        "startswith",
        "strip",
        "update",
        "upper",
        "width",
        "tobytes",
        "insert",
        "fromarray",
        "thumbnail",
        "named_modules",
        "modules",
        "named_parameters",
        "parameters",
        "state_dict",
        "children",
        "named_children",
        "eval",
    }
)
# Any expression in a step with one of these is a tensor: numpy arrays and modules lack them, too.
SURELY_TENSOR_METHODS = frozenset(
    {
        TENSOR_GIVEN,
        "argmax",
        "chunk",
        "clamp_min",
        "clamp_max",
        "contiguous",
        "cumsum",
        "detach",
        "expand",
        "expand_as",
        "fill_",
        "gather",
        "index_select",
        "long",
        "masked_fill",
        "masked_fill_",
        "masked_scatter",
        "new_full",
        "new_ones",
        "new_tensor",
        "new_zeros",
        "permute",
        "repeat_interleave",
        "scatter",
        "scatter_",
        "softmax",
        "log_softmax",
        "softplus",
        "sigmoid",
        "tanh",
        "type_as",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view_as",
        "zero_",
        "narrow",
        "movedim",
        "amax",
        "amin",
        "logsumexp",
        "new_empty",
        "masked_select",
    }
)
# Functions of a tensor that return one of dtype bool.
MASK_FUNCTIONS = frozenset(
    {
        "bool",
        "isnan",
        "isinf",
        "isfinite",
        "isclose",
        "isin",
        "logical_and",
        "logical_or",
        "logical_not",
        "logical_xor",
        "eq",
        "ne",
        "lt",
        "gt",
        "le",
        "ge",
        "not_equal",
        "greater",
        "less",
        "greater_equal",
        "less_equal",
        "signbit",
        "any",
        "all",
        "equal",
    }
)
# Functions that return a mask when they are applied to a mask.
MASK_KEEPERS = frozenset(
    {
        "any",
        "all",
        "view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "expand",
        "expand_as",
        "to",
        "transpose",
        "permute",
        "flatten",
        "contiguous",
        "clone",
        "detach",
        "repeat",
        "chunk",
        "cat",
        "stack",
        "tril",
        "triu",
        "flip",
        "roll",
        "repeat_interleave",
        "broadcast_to",
        "cuda",
        "cpu",
        "masked_fill",
        "masked_fill_",
        "zeros_like",
        "ones_like",
        "where",
        "split",
        "narrow",
        "index_select",
        "gather",
        "unbind",
        "unflatten",
        "type_as",
        "pad",
        "movedim",
        "swapaxes",
        "squeeze_",
        "unsqueeze_",
        "view_as",
        "reshape_as",
        "T",
    }
)
# Functions that return several tensors.
SEQUENCE_FUNCTIONS = frozenset(
    {
        "chunk",
        "split",
        "unbind",
        "tensor_split",
        "meshgrid",
        "broadcast_tensors",
        "hsplit",
        "vsplit",
    }
)
# Methods that read a tensor's value on the host and return Python numbers.
NUMBER_METHODS = frozenset({"item", "tolist"})
HOST_COPIES = frozenset({"numpy", "__array__"})
BOOL_DTYPES = frozenset({"torch.bool"})
# Fields of model outputs that are tuples or objects: their truth value and length are concrete.
OUTPUT_SEQUENCES = frozenset(
    {
        "hidden_states",
        "attentions",
        "past_key_values",
        "cross_attentions",
        "router_logits",
        "encoder_hidden_states",
        "encoder_attentions",
        "decoder_hidden_states",
        "decoder_attentions",
        "all_hidden_states",
        "all_attentions",
        "latent_dist",
    }
)
# Annotations of host values.
HOST_ANNOTATIONS = frozenset(
    {
        "int",
        "float",
        "bool",
        "str",
        "bytes",
        "device",
        "dtype",
        "Size",
        "Path",
        "Generator",
        "PretrainedConfig",
        "PreTrainedConfig",
        "Config",
        "Number",
        "Literal",
        "range",
        "complex",
    }
)


def is_operation(name: str) -> bool:
    """Return whether a full name is that of a torch function that computes with tensors."""
    package, _, last = name.rpartition(".")
    if package == "torch.nn.functional":
        return True
    made = last in CREATION_TORCH or last in HOST_TORCH or last in RANDOM_TORCH
    return package == "torch" and not made and last.islower()
