"""Every message that the protocol allows, and every one that it just does not."""

from collections.abc import Mapping
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from core.messages import AnyMessage

MESSAGE_TYPES: tuple[type[msgspec.Struct], ...] = get_args(AnyMessage)
_INT64 = 2**63


def messages(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Return messages of one type, with values at and between their bounds."""
    return _of(inspect.type_info(kind))


def _of(info: inspect.Type) -> st.SearchStrategy[Any]:
    for kind, make in _MAKERS.items():
        if isinstance(info, kind):
            return make(info)
    raise NotImplementedError(info)


def _integers(info: inspect.IntType) -> st.SearchStrategy[int]:
    low = info.ge if info.ge is not None else info.gt + 1 if info.gt is not None else -_INT64
    high = info.le if info.le is not None else info.lt - 1 if info.lt is not None else _INT64 - 1
    return st.sampled_from([low, high, min(low + 1, high)]) | st.integers(low, high)


def _floats(info: inspect.FloatType) -> st.SearchStrategy[float]:
    return st.floats(
        info.gt if info.ge is None else info.ge,
        info.lt if info.le is None else info.le,
        exclude_min=info.gt is not None,
        exclude_max=info.lt is not None,
        allow_nan=info.ge is None and info.gt is None,
    )


def _texts(info: inspect.StrType) -> st.SearchStrategy[str]:
    if info.pattern is not None:
        return st.from_regex(info.pattern)
    return st.text(max_size=min(info.max_length or 40, 40)) | st.just("x" * (info.max_length or 1))


def _arrays(info: inspect.VarTupleType) -> st.SearchStrategy[tuple[Any, ...]]:
    low = info.min_length or 0
    return st.lists(_of(info.item_type), min_size=low, max_size=low + 3).map(tuple)


def _dicts(info: inspect.DictType) -> st.SearchStrategy[dict[Any, Any]]:
    return st.dictionaries(_of(info.key_type), _of(info.value_type), max_size=3)


def _instances(info: inspect.StructType) -> st.SearchStrategy[Any]:
    fields = {field.name: _of(field.type) for field in info.fields}
    return st.builds(info.cls, **fields)


_MAKERS: Mapping[Any, Any] = {
    inspect.BoolType: lambda _: st.booleans(),
    inspect.IntType: _integers,
    inspect.FloatType: _floats,
    inspect.StrType: _texts,
    inspect.BytesType: lambda info: st.binary(max_size=min(info.max_length or 64, 64)),
    inspect.NoneType: lambda _: st.none(),
    inspect.LiteralType: lambda info: st.sampled_from(info.values),
    inspect.EnumType: lambda info: st.sampled_from(list(info.cls)),
    inspect.UnionType: lambda info: st.one_of(*map(_of, info.types)),
    inspect.VarTupleType: _arrays,
    inspect.TupleType: lambda info: st.tuples(*map(_of, info.item_types)),
    inspect.DictType: _dicts,
    inspect.StructType: _instances,
}
