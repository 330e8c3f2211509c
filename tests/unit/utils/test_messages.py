"""Values that processes send each other arrive unchanged, and no message makes the receiver run anything."""

import io
import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from tests.support.properties import examples
from utils.messages import HEADER, from_bytes, to_bytes


class Pair(NamedTuple):
    first: Any
    second: Any


NUMPY_TYPES = (
    arrays_of.scalar_dtypes() | arrays_of.unicode_string_dtypes() | arrays_of.array_dtypes(max_size=2)
).filter(lambda dtype: dtype.itemsize > 0)
SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
ARRAYS = arrays_of.arrays(NUMPY_TYPES, SHAPES, fill=st.nothing())
TORCH_TYPES = [
    torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
TEXTS = st.text(st.characters(), max_size=5) | st.text("\udc80\ud800\n\0/", max_size=3)
PLAIN = st.none() | st.booleans() | st.integers() | st.integers(2**70, 2**90) | st.floats() | TEXTS
KEYS = PLAIN | TEXTS.map(Path) | st.tuples(st.integers(), TEXTS)


@st.composite
def tensors(draw) -> torch.Tensor:
    """Draw a tensor of zeros and ones, and sometimes reverse its dimensions."""
    dtype, shape = draw(st.sampled_from(TORCH_TYPES)), draw(SHAPES)
    numbers = torch.randint(0, 2, shape, generator=torch.manual_seed(draw(st.integers(0, 99)))).to(dtype)
    return numbers.permute([*reversed(range(len(shape)))]) if draw(st.booleans()) else numbers


def containers(items: st.SearchStrategy) -> st.SearchStrategy:
    lists = st.lists(items, max_size=3)
    return lists | lists.map(tuple) | st.builds(Pair, items, items) | st.dictionaries(KEYS, items, max_size=3)


LEAVES = PLAIN | TEXTS.map(Path) | ARRAYS | ARRAYS.map(np.asfortranarray) | tensors()
VALUES = st.recursive(LEAVES | ARRAYS.filter(np.size).map(lambda array: array.flat[0]), containers, max_leaves=8)


def assert_same(actual: Any, expected: Any) -> None:
    """Assert that two values are equal in their types and in every bit."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert_same([*actual.items()], [*expected.items()])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for pair in zip(actual, expected, strict=True):
            assert_same(*pair)
    elif isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tolist() == expected.tolist()
    elif isinstance(expected, np.ndarray | np.generic):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes()
    elif isinstance(expected, float):
        assert math.isnan(actual) == math.isnan(expected) and (math.isnan(expected) or actual.hex() == expected.hex())
    else:
        assert actual == expected


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Stored array in format")  # because names of fields are not Latin
@given(VALUES)
@examples(200)
def test_values_arrive_with_their_types_and_bits(value):
    assert_same(from_bytes(to_bytes(value, [Pair]), [Pair]), value)


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, np.array([None]), object(), Pair(1, 2), print])
def test_value_that_would_need_a_pickle_is_refused_by_its_sender(value):
    with pytest.raises((TypeError, ValueError)):
        to_bytes(value)


def message_of(content: Any, arrays: bytes = b"") -> bytes:
    text = json.dumps(content).encode()
    return HEADER.pack(len(text)) + text + arrays


def file_of(array: np.ndarray, save=np.save) -> bytes:
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a message was unpickled",)


EIGHT = file_of(np.zeros(8, np.uint8))
OBJECTS = np.array([Bomb()], dtype=object)
HOSTILE = {
    "array of objects": message_of(["array"], file_of(OBJECTS)),
    "number of objects": message_of(["number"], file_of(OBJECTS)),
    "archive of arrays": message_of(["array"], file_of(OBJECTS, np.savez)),
    "pickle": message_of(["array"], pickle.dumps(Bomb())),
    "only a pickle": pickle.dumps(Bomb()),
    "a function as type": message_of(["tensor", "load", 8], EIGHT),
    "a class as type": message_of(["tensor", "__class__", 8], EIGHT),
    "a module as type": message_of(["tensor", "_inductor", 8], EIGHT),
    "huge tensor": message_of(["tensor", "uint8", 10**18], EIGHT),
    "huge empty tensor": message_of(["tensor", "uint8", 10**13], file_of(np.zeros(0, np.uint8))),
    "huge array": message_of(["array"], file_of(np.zeros(10, "u1")).replace(b"(10,)", b"(1" + b"0" * 18 + b",)")),
    "unknown class": message_of(["Pair", 1, 2]),
    "name of a Python class": message_of(["object"]),
    "too deep": HEADER.pack(10**6) + b"[" * 10**6,
    "no kind": message_of([]),
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_message_raises_and_imports_nothing(name):
    before = set(sys.modules)
    with pytest.raises(Exception):  # noqa: B017 - any error does
        from_bytes(HOSTILE[name])
    assert set(sys.modules) == before


SAFE = (type(None), bool, int, float, str, Path, np.ndarray, np.generic, torch.Tensor)


def contents(value: Any) -> list:
    """Return the values in a value that are no containers."""
    if type(value) is dict:
        return [leaf for pair in value.items() for leaf in contents(pair)]
    if type(value) in (list, tuple, Pair):
        return [leaf for item in value for leaf in contents(item)]
    return [value]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@given(VALUES, st.data())
@examples(200)
def test_damaged_message_raises_or_gives_plain_values(value, data):
    message = bytearray(to_bytes(value, [Pair]))
    for place in data.draw(st.lists(st.integers(0, len(message) - 1), min_size=1, max_size=4)):
        message[place] = data.draw(st.integers(0, 255) | st.sampled_from(b'[]",0'))
    try:
        arrived = from_bytes(bytes(message), [Pair])
    except Exception:
        return
    assert all(isinstance(leaf, SAFE) for leaf in contents(arrived))
