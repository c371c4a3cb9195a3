"""PyTorch's operators that only compute from tensors.

All are listed by name: ATen's public operators in ``aten_allowed.txt``, the others here.
"""

from __future__ import annotations

import re

from modelport.gateway.repository.artifact_checks import operator_lists

_ATEN = operator_lists.read("aten_allowed")

#: Names that begin with an underscore, except operators that do not check the sizes they are given.
_PRIVATE = re.compile(
    r"__(and|contains|getitem|i?(and|or|xor|[lr]shift)|is|isnot|not|or|xor|[lr]shift)__"
    r"|__(derive_index|range_length|round_to_zero_floordiv|interpolate|upsample\w*)"
    r"|_(adaptive_avg_pool[23]d|addmm_activation|aminmax|assert_(async|scalar|tensor_metadata)"
    r"|batch_norm_\w+|native_batch_norm_\w+|cast_\w+|cdist_forward|pdist_forward|euclidean_dist"
    r"|chunk_cat|convolution(_mode)?|conv_depthwise2d|cumm(ax|in)_helper|dim_arange|dirichlet_grad"
    r"|embedding_bag(_forward_only)?|empty_affine_quantized|fake_quantize_learnable\w+"
    r"|fake_quantize_per_tensor_affine_cachemask_tensor_qparams|fft_(c2c|c2r|r2c)|foreach_\w+"
    r"|functional_\w+|fused_\w+|get_tracing_state|grid_sampler_2d_cpu_fallback|histogramdd\w+"
    r"|index_put_impl_|infer_size|int_mm|linalg_\w+|list_to_tensor|local_scalar_dense|log_softmax"
    r"|logcumsumexp|lu_with_info|make_dep_token|masked_(scale|softmax)|native_multi_head_attention"
    r"|neg_view|conj(_\w+)?|nnpack_\w+|mkldnn_(reshape|transpose)|pack_padded_sequence|pad_\w+"
    r"|prelu_kernel|print|resize_output_?|rowwise_prune|safe_softmax|scaled_\w+|scatter_reduce"
    r"|set_item|shape_as_tensor|size_if_not_equal|sample_dirichlet|softmax|stack|cat|standard_gamma"
    r"|test_check_tensor|thnn_\w+|to_copy|transform_bias_rescale_qkv"
    r"|transformer_encoder_layer_fwd|trilinear|triton_\w+|unique2?|unsafe_(index|view)"
    r"|unsafe_index_put|unwrap_optional|upsample_\w+|weight_(norm|norm_interface|int[48]pack_mm)"
    r"|weight_int4pack_mm_for_cpu|convert_weight_to_int4pack\w*|weight_norm_interface|wrapped_\w+"
    r"|sparse_mm|sparse_softmax|sparse_sum|sparse_log_softmax|nested_tensor_from_\w+"
    r"|batch_norm_impl_index|assert|dyn_quant_\w+|efficientzerotensor|ctc_loss|spdiags"
    r"|add_relu_?|is_(all|any)_true|to_(cpu|dense|sparse\w*)|tensor_to_list|grouped_mm|no_grad_\w+"
    r"|(flash|efficient)_attention_forward|cudnn_rnn|slow_conv2d_forward|unsafe_masked_index\w*"
    r"|values|nnz|coalesced|reshape_copy|reshape_from_tensor|compute_linear_combination"
    r"|choose_qparams_per_tensor|sparse_csr_(sum|prod)|amp_\w+)"
)

#: Operations of TorchScript's interpreter: values, containers and control flow.
_PRIM = frozenset(
    str.split(
        """
        AutogradAdd AutogradZero BroadcastSizes ChunkSizes Constant ConstantChunk CreateObject
        DictConstruct EnumName EnumValue GetAttr If Loop ListConstruct ListUnpack
        ModuleContainerIndex NumToTensor Print RaiseException SetAttr StringIndex TupleConstruct
        TupleIndex TupleSlice TupleUnpack Uninitialized VarConcat VarStack abs annotate data
        device dtype grad index is_cpu is_cuda is_meta is_mkldnn is_mps is_nested is_quantized
        is_sparse is_sparse_csr is_vulkan is_xla is_xpu isinstance itemsize layout max min name
        nbytes rangelist requires_grad shape tolist type unchecked_cast unchecked_unwrap_optional
        unpackedTuple
        """
    )
)

#: Control flow of ``torch.export``, whose branches are graphs of the same operators.
_HIGHER_ORDER = frozenset(
    str.split(
        """
        associative_scan checkpoint cond flex_attention invoke_subgraph map map_impl scan
        while_loop wrap_with_autocast wrap_with_set_grad_enabled
        """
    )
)

_PYTHON = frozenset(
    str.split(
        """
        abs add and_ eq floordiv ge getitem gt index invert le lshift lt mod mul ne neg not_ or_
        pos pow rshift sub truediv xor
        """
    )
)

_MATH = re.compile(r"a?(cos|sin|tan)h?|ceil|floor|trunc|sqrt|exp|log2?|log10|pow|isqrt|fabs|fmod")
_SYMBOLIC = re.compile(r"_?sym_\w+")
#: No overload begins with an underscore: what does belongs to Python's object of the operator.
_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.([^\W_]\w*))?", re.ASCII)


def is_pure(kind: str) -> bool:
    """Whether an operator, ``namespace::name``, only computes."""
    namespace, _, name = kind.partition("::")
    if namespace == "aten":
        return bool(_PRIVATE.fullmatch(name)) if name.startswith("_") else name in _ATEN
    return namespace == "prims" or (namespace == "prim" and name in _PRIM)


def is_pure_target(target: str) -> bool:
    """The same for the target of a ``torch.export`` node, such as ``torch.ops.aten.add.Tensor``."""
    if found := _OPERATOR.fullmatch(target):
        namespace, name, _ = found.groups()
        if namespace == "higher_order":
            return name in _HIGHER_ORDER
        known = is_pure(f"{namespace}::{name}") or namespace == "quantized_decomposed"
        return known and (namespace == "aten" or not name.startswith("__"))
    module, _, name = target.partition(".")
    if module == "_operator":
        return name in _PYTHON
    known = {"math": _MATH, "torch": _SYMBOLIC}
    return module in known and known[module].fullmatch(name) is not None
