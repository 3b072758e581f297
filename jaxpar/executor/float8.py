"""A layer whose matmuls with weights are multiplied in float8, by `qwix`, Google's quantisation library.

The layer is traced first, and each of its `dot_general` that has a weight on one side is put through qwix. qwix's own
way, to patch `lax.dot_general` while a module runs, cannot be relied on: `x @ w` is jitted, and what jit traced before,
with the patch or without, it takes again.
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import dot_general_p, jit_p

from jaxpar.errors import PlanError
from jaxpar.model import Context
from jaxpar.plan import Plan
from jaxpar.structure import Params

Layer = Callable[[Params, Any, Context], Any]


def float8_problems(plan: Plan) -> list[str]:
    """That the library is missing, if the plan needs it."""
    if plan.precision != "fp8" or importlib.util.find_spec("qwix") is not None:
        return []
    return ["precision='fp8' needs the package qwix, which is not installed: pip install 'jaxpar[fp8]'"]


def in_float8(layer: Layer, name: str) -> Layer:
    """`layer`, with the matmuls of weights in float8; what else it does stays as it is.

    A matmul counts if exactly one operand is made of weights alone and its result is bfloat16: a model keeps one out
    of float8 by asking for a float32 result. Those inside a scan, a condition or a function with its own derivative
    are not seen. `name`: of the stack. Raises `PlanError` where there is no such matmul.
    """

    def run(weights: Params, x: Any, ctx: Context) -> Any:
        traced, shapes = jax.make_jaxpr(lambda weights, x: layer(weights, x, ctx), return_shape=True)(weights, x)
        inputs, others = jax.tree.leaves(weights), jax.tree.leaves(x)
        rewriter = _Rewriter()
        values = [_Value(v, True) for v in inputs] + [_Value(v, False) for v in others]
        outputs = rewriter.evaluate(traced, values)
        if not rewriter.replaced:
            raise PlanError(
                f"precision='fp8': no layer of {name!r} multiplies by a weight with a bfloat16 result, so nothing "
                f"would be in float8; choose precision='bfloat16'"
            )
        return jax.tree.unflatten(jax.tree.structure(shapes), [v.array for v in outputs])

    return run


@dataclass(frozen=True)
class _Value:
    """An array in the trace, and whether it is made of weights alone."""

    array: Any
    of_weights: bool


@dataclass
class _Rewriter:
    """Runs a traced function equation by equation. `replaced`: how many matmuls it gave to qwix."""

    replaced: int = field(default=0, init=False)

    def evaluate(self, traced: Any, inputs: Iterable[_Value]) -> list[_Value]:
        jaxpr: Jaxpr = traced.jaxpr
        constants = [_Value(v, False) for v in traced.consts]
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val, False) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            values = [read(atom) for atom in equation.invars]
            known |= zip(equation.outvars, self._run(jaxpr, equation, values), strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _run(self, jaxpr: Jaxpr, equation: JaxprEqn, values: list[_Value]) -> list[_Value]:
        if equation.primitive is jit_p:
            return self.evaluate(equation.params["jaxpr"], values)
        if _quantised(equation, values):
            self.replaced += 1
            lhs, rhs = values
            return [_Value(_with_weights_right(lhs, rhs, equation.params["dimension_numbers"]), False)]
        # Literals have no part in it: `2 * w` is a weight.
        pairs = zip(equation.invars, values, strict=True)
        variables = {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
        alone = jaxpr.replace(constvars=[], invars=list(variables), outvars=equation.outvars, eqns=[equation])
        outputs = jax.core.eval_jaxpr(alone, [], *(v.array for v in variables.values()))
        of_weights = bool(variables) and all(v.of_weights for v in variables.values())
        return [_Value(array, of_weights) for array in outputs]


def _quantised(equation: JaxprEqn, values: list[_Value]) -> bool:
    if equation.primitive is not dot_general_p:
        return False
    lhs, rhs = values
    asked = equation.params["preferred_element_type"]
    bfloat16 = lhs.array.dtype == rhs.array.dtype == jnp.bfloat16 and (asked is None or asked == jnp.bfloat16)
    return bfloat16 and lhs.of_weights != rhs.of_weights


def _with_weights_right(lhs: _Value, rhs: _Value, dimension_numbers: Any) -> Array:
    """So that qwix's two gradients are always the one of the activations and the one of the weights, in this order."""
    if rhs.of_weights:
        return _matmul(lhs.array, rhs.array, dimension_numbers)
    contracted, batch = dimension_numbers
    swapped = _matmul(rhs.array, lhs.array, (contracted[::-1], batch[::-1]))
    lead, free = len(batch[0]), rhs.array.ndim - len(contracted[1]) - len(batch[1])
    last = range(lead, lead + free)
    return lax.transpose(swapped, [*range(lead), *range(lead + free, swapped.ndim), *last])


def _matmul(lhs: Array, rhs: Array, dimension_numbers: Any) -> Array:
    # Its backward quantises again: else each layer would keep a copy of its gathered weights until then.
    multiply = jax.checkpoint(lambda lhs, rhs: _module()(lhs, rhs, dimension_numbers))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return multiply(lhs, rhs)


class _Matmul(nnx.Module):
    def __call__(self, lhs: Array, rhs: Array, dimension_numbers: Any) -> Array:
        return lax.dot_general(lhs, rhs, dimension_numbers)


@cache
def _module() -> nnx.Module:
    """A matmul in qwix's hands: operands in e4m3, gradients that go on to the layer before in e5m2.

    One scale per row and per column, of what is there: no state, and no row's number depends on another row. The
    gradient of the weights sums over rows, so that a scale of it would depend on how they are spread: it is taken in
    bfloat16.
    """
    import qwix

    rule = qwix.QtRule(
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
        additional_qt_config={"drhs_grad_qtype": None},
    )
    return qwix.quantize_model(_Matmul(), qwix.QtProvider([rule]), skip_nnx_init=True)
