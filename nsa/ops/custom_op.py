"""Register a PyTorch custom op, its fake kernel and its gradient from one declaration.

Callers pass an op's inputs as a NamedTuple, tensors before constants, and implementations receive
it. Its annotated fields give the op's schema. A schema has no type for an NSASpec, which is passed
as seven integers.

`torch.library.custom_op` and `register_autograd` would do the same without private names of torch,
but forward and backward then take the host 31 to 54% longer. (Three measurements, kernels not
started: four layers with φ `pool` and the selector loss on 64 tokens, tenth percentile of 60 steps
in alternating processes.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd as _BelowAutograd
from torch._library.custom_ops import get_library_allowing_overwrite

from nsa.spec import NSASpec

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    NSASpec: "int[]",
    list[int]: "int[]",
    int: "SymInt",
    float: "float",
    str: "str",
}

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}  # by the op's name


class TileTooLarge(Exception):
    """A kernel could not launch with its tile sizes; the next call takes another tile.

    The op then runs again, which is safe: an implementation writes only to what it allocates.
    """


class Gradient(NamedTuple):
    """The backward pass of an op, registered as the op `<name>_backward`.

    `backward(*output_gradients, inputs, *saved_outputs)` returns the gradients of the first inputs.
    The gradient of an input that is None is a tensor without elements.
    """

    backward: Callable[..., Any]
    inputs: int  # number of inputs with a gradient; they come first
    outputs: int  # number of differentiable outputs; they come first
    saved: slice = slice(None)  # the outputs that `backward` reads
    # For each input with a gradient, which result of `backward` it is; (): in order.
    result_of: tuple[int, ...] = ()
    shape_only: int = 0  # of this many first inputs, `backward` reads only shape and dtype
    zeros: bool = True  # `backward` gets zeros for an output without a gradient; False: None


def register(
    name: str,
    inputs: Any,
    forward: Callable[[Any], Any],
    fake: Callable[[Any], Any],
    outputs: int = 1,
    gradient: Gradient | None = None,
) -> Any:
    """Register the op `name`; return a function that calls it with `inputs`.

    `forward` and `fake` map `inputs` to `outputs` tensors.
    """
    schema = f"({_schema(inputs)}) -> {_tensors(outputs)}"
    autograd = () if gradient is None else _autograd(name, inputs, outputs, gradient)
    op = _define(name, schema, _reader(inputs), forward, fake, *autograd)
    hints = list(get_type_hints(inputs).values())
    if NSASpec not in hints:
        return lambda x: op(*x)
    at = hints.index(NSASpec)
    return lambda x: op(*x[:at], x[at].to_ints(), *x[at + 1 :])


def _define(
    name: str,
    schema: str,
    read: Callable[[Sequence[Any]], Sequence[Any]],
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    autograd: Callable[..., Any] | None = None,
) -> Any:
    """Define an op with the dispatcher's own functions, which the top of this file explains.

    `read` turns an op's arguments into the arguments of `implementation` and `fake`.
    """

    def kernel(*args: Any) -> Any:
        inputs = read(args)
        while True:
            try:
                return implementation(*inputs)
            except TileTooLarge:
                continue

    namespace, _, short = name.partition("::")
    library = get_library_allowing_overwrite(namespace, short)
    library.define(short + schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(short, torch._disable_dynamo(kernel), "CompositeExplicitAutograd")
    IMPLEMENTATIONS[name] = kernel
    torch.library.register_fake(name, lambda *args: fake(*read(args)), lib=library)
    op = getattr(getattr(torch.ops, namespace), short).default

    def forward(ctx: Any, *args: Any) -> Any:
        with _BelowAutograd():
            results = op(*args)
        if ctx is not None and setup_context is not None:
            setup_context(ctx, args, results)
        return results

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if autograd is None:
            raise RuntimeError(f"{name} has no gradient")
        return autograd(ctx, *gradients)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(short, (torch.autograd.Function,), methods)

    def differentiable(*args: Any) -> Any:
        return function.apply(*args) if torch.is_grad_enabled() else forward(None, *args)

    library.impl(short, differentiable, "Autograd")
    return op


def _autograd(
    name: str, inputs: Any, outputs: int, gradient: Gradient
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Register the op `<name>_backward`; return its `setup_context` and its autograd function."""
    read, count, fields = _reader(inputs), gradient.outputs, len(inputs._fields)
    # Autograd fills in zeros only if all outputs are differentiable. A single differentiable output
    # needs none: without its gradient there is no backward pass.
    assert not gradient.zeros or count in (1, outputs), f"{name}: set zeros=False"
    tensors = sum(hint in (Tensor, Tensor | None) for hint in get_type_hints(inputs).values())
    result_of = gradient.result_of or tuple(range(gradient.inputs))
    # For each result of `backward`, the first input with this gradient, which has its shape.
    input_of = {result: result_of.index(result) for result in result_of}
    optional = "" if gradient.zeros else "?"
    output_gradients = [f"Tensor{optional} gradient_{i}" for i in range(count)]
    saved_outputs = [f"Tensor output_{i}" for i in range(outputs)[gradient.saved]]

    def read_backward(args: Sequence[Any]) -> Sequence[Any]:
        end = count + fields
        return *args[:count], *read(args[count:end]), *args[end:]

    def fake(*args: Any) -> Any:
        values = args[count]  # `inputs`
        like = [values[i] for i in input_of.values()]
        results = [values[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in like]
        return tuple(results) if len(results) > 1 else results[0]

    schema = ", ".join([*output_gradients, _schema(inputs), *saved_outputs])
    schema = f"({schema}) -> {_tensors(len(input_of))}"
    backward_op = _define(f"{name}_backward", schema, read_backward, gradient.backward, fake)

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        output = output if outputs > 1 else (output,)
        first, saved = inputs[: gradient.shape_only], inputs[gradient.shape_only : tensors]
        # An expanded tensor has shape and dtype, and holds one element.
        shapes = [None if x is None else x.new_empty(()).expand(x.shape) for x in first]
        ctx.save_for_backward(*shapes, *saved, *output[gradient.saved])
        ctx.constants = inputs[tensors:]
        if count < outputs:
            ctx.mark_non_differentiable(*output[count:])
        if count < outputs or not gradient.zeros:
            ctx.set_materialize_grads(False)  # no zero gradients for the other outputs

    def autograd(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not gradient.zeros and all(x is None for x in output_gradients[:count]):
            return (None,) * fields
        saved = ctx.saved_tensors  # read once: non-reentrant checkpointing unpacks only once
        values, saved_outputs = saved[:tensors], saved[tensors:]
        results = backward_op(*output_gradients[:count], *values, *ctx.constants, *saved_outputs)
        results = results if len(input_of) > 1 else (results,)
        pairs = zip(values, result_of, strict=False)  # only the first inputs have a gradient
        gradients = [None if x is None else results[i] for x, i in pairs]
        return *gradients, *[None] * (fields - gradient.inputs)

    return setup_context, autograd


def _schema(inputs: Any) -> str:
    hints = get_type_hints(inputs)
    return ", ".join(f"{_SCHEMA_TYPES[hints[name]]} {name}" for name in inputs._fields)


def _tensors(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _reader(inputs: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function from an op's arguments to `(inputs,)`: seven integers become an NSASpec.

    It calls `tuple.__new__`, because `inputs(*args)` and `inputs._make` take longer.
    """
    hints, new = list(get_type_hints(inputs).values()), tuple.__new__
    if NSASpec not in hints:
        return lambda args: (new(inputs, args),)
    at = hints.index(NSASpec)

    def read(args: Sequence[Any]) -> Sequence[Any]:
        spec = NSASpec.from_ints(args[at])
        return (new(inputs, (*args[:at], spec, *args[at + 1 :])),)

    return read
