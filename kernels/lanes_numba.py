"""Rows of a tile of queries as vectors, for the kernels that numba compiles.

A tile is a ``[rows, lanes]`` array with a query to a lane, laid out so that a sparse product gathers whole cache lines.
numba compiles a loop over the lanes of a row to so many scalar steps; here a row is a type of its own, which lives in a
vector register, and a handful of operations on it. How many lanes it has is told by ``row``, a tuple of as many zeros,
which the kernels hand down.

numba's cache looks at the file of the kernel only: after a change here, remove it (``__pycache__``).
"""

# numba has types, but not for the classes that a new type is made of.
# mypy: allow-untyped-calls

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, models, register_model

LINE = 64  # bytes of a cache line
FEW = 4  # queries for which a row is not padded to a line: of a large memory, more of the state fits the cache


def width_of(slots: int, element_size: int) -> int:
    """How many lanes a row of numbers of so many bytes should have for so many queries."""
    return FEW if slots <= FEW else LINE // element_size


class Lanes(types.Type):
    """A row of a tile, in a vector register. Its kind is told by ``row``, a tuple of as many zeros as it has lanes."""

    def __init__(self, row: Any) -> None:
        self.dtype, self.count = row.dtype, row.count
        super().__init__(name=f"Lanes({row.dtype}, {row.count})")


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        element = ir.FloatType() if lanes.dtype == types.float32 else ir.DoubleType()
        super().__init__(manager, lanes, ir.VectorType(element, lanes.count))


def _place(context: Any, builder: Any, array_type: Any, array: Any, i: Any, lanes: Lanes) -> Any:
    """Where row ``i`` of a contiguous ``[nodes, lanes]`` array starts."""
    base = context.make_array(array_type)(context, builder, array).data
    place = builder.gep(base, [builder.mul(i, ir.Constant(i.type, lanes.count))])
    return builder.bitcast(place, context.get_value_type(lanes).as_pointer())


@intrinsic
def load(typing: Any, array: Any, i: Any, row: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_place(context, builder, array, args[0], args[1], signature.return_type))
        value.align = array.dtype.bitwidth // 8
        return value

    return Lanes(row)(array, types.intp, row), emit


@intrinsic
def store(typing: Any, array: Any, i: Any, lanes: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, array, args[0], args[1], lanes)
        builder.store(args[2], place).align = array.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), emit


@intrinsic
def splat(typing: Any, number: Any, row: Any) -> Any:
    """The same number in every lane."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, index = context.get_value_type(signature.return_type), ir.IntType(32)
        unset = ir.Constant(vector, ir.Undefined)
        one = builder.insert_element(unset, args[0], ir.Constant(index, 0))
        return builder.shuffle_vector(one, unset, ir.Constant(ir.VectorType(index, vector.count), [0] * vector.count))

    return Lanes(row)(row.dtype, row), emit


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a b + c``, in one instruction where the machine has it."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = builder.fmul(args[0], args[1], flags=("contract",))
        return builder.fadd(product, args[2], flags=("contract",))

    return a(a, b, c), emit


@intrinsic
def multiply(typing: Any, a: Any, b: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return a(a, b), emit


@intrinsic
def divide(typing: Any, a: Any, b: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return a(a, b), emit


@intrinsic
def one_unless_above(typing: Any, a: Any, least: Any) -> Any:
    """Each lane as it is where it lies above ``least``, and 1 elsewhere."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ones = ir.Constant(args[0].type, [1.0] * args[0].type.count)
        return builder.select(builder.fcmp_ordered(">", *args), args[0], ones)

    return a(a, least), emit
