"""FLOPs of the forms a matrix product takes in compiled programs, from the text XLA prints."""

import pytest

from jaxpar.estimate.hlo import read_hlo

HEAD = "HloModule m\n\nENTRY %main (a: f32[4,8,16], b: f32[4,16,32]) -> f32[4,8,32] {\n"
OPERANDS = "  %a = f32[4,8,16]{2,1,0} parameter(0)\n  %b = f32[4,16,32]{2,1,0} parameter(1)\n"
BATCHED = 2 * 4 * 8 * 16 * 32


@pytest.mark.parametrize(
    "product",
    [
        "f32[4,8,32]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, "
        "rhs_contracting_dims={1}",
        '(f32[4,8,32]{2,1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
        '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}',
        "(f32[4,8,32]{2,1,0}, s8[4194304]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul$f8", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]}}}',
        'f32[4,8,32]{2,1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul", backend_config={}',
    ],
)
def test_a_batched_product_costs_the_same_in_every_form(product):
    """Otherwise the FLOPs of a model would depend on which library XLA calls."""
    found = read_hlo(f"{HEAD}{OPERANDS}  ROOT %r = {product}\n}}\n", {})
    assert found.dot_flops == BATCHED
    assert found.opaque_calls == ()


def test_a_convolution_costs_its_kernel_at_every_output():
    """Otherwise patch embeddings and short convolutions would be free."""
    text = """HloModule m

ENTRY %main (x: f32[2,10,10,6], k: f32[3,3,6,8]) -> f32[2,8,8,8] {
  %x = f32[2,10,10,6]{3,2,1,0} parameter(0)
  %k = f32[3,3,6,8]{3,2,1,0} parameter(1)
  ROOT %r = f32[2,8,8,8]{3,2,1,0} convolution(%x, %k), window={size=3x3}, dim_labels=b01f_01io->b01f
}
"""
    assert read_hlo(text, {}).dot_flops == 2 * (2 * 8 * 8 * 8) * (3 * 3 * 6)


def test_a_kernel_whose_work_is_unknown_is_named():
    """Otherwise a hand-written kernel's FLOPs would be missing without a word."""
    call = 'f32[4,8,32]{2,1,0} custom-call(%a, %b), custom_call_target="__gpu$xla.gpu.triton"'
    assert read_hlo(f"{HEAD}{OPERANDS}  ROOT %r = {call}\n}}\n", {}).opaque_calls == ("__gpu$xla.gpu.triton",)
