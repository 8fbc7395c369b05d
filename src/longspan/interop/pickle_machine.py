"""A pickle interpreter for state dicts that cannot execute code.

Opcodes are decoded with `pickletools.genops`, which executes nothing. Values are dicts, lists, tuples and plain values.
A name in the pickle is compared with a short list of known names; it is never imported, looked up or called. Objects of
any other type are an error or, if the caller only needs the plain values next to them, become `UNREAD`.

Memory and time are bounded by the size of the file. An opcode has at least one byte and does a constant amount of work,
with two exceptions that are limited here: a call that copies a list, because the memo can pass one list to many calls,
and a dict lookup, because its cost depends on keys that the file chooses.
"""

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# A state dict needs about 40 opcodes per tensor, so a longer file is not a state dict.
OPCODE_LIMIT = 2_000_000
# A vocabulary needs six opcodes per word: a list of words, a dict from word to id and one from word to count.
VOCABULARY_LIMIT = 8_000_000
AXES_LIMIT = ARGUMENT_LIMIT = 16
KEY_LIMIT = 4096
NUMBER_LIMIT = 1 << 127  # the legacy format's magic number has 77 bits
ELEMENT_LIMIT = 1 << 48
DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
PLAIN = frozenset({str, bytes, int, float, bool, type(None)})


class Damaged(Exception):
    """What is wrong with a file, as part of a sentence; the caller adds the path."""


@dataclass(frozen=True)
class Name:
    """A global name in a pickle, as text; it is never looked up."""

    module: str
    name: str


class Unread:
    """A placeholder for every object that the interpreter does not build."""


UNREAD = Unread()


@dataclass(frozen=True)
class Storage:
    """A flat array that the pickle refers to by key; its contents are elsewhere in the file."""

    key: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Strided:
    """A tensor as described in the pickle: a view of a storage."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def run(source: Any, *, unread: bool = False, limit: int | None = None) -> Any:
    """The value of one pickle. `source` is bytes, or has read, readline and tell.

    With `unread`, objects of other types become `UNREAD`; otherwise they are an error."""
    machine = _Machine(unread, limit or OPCODE_LIMIT)
    try:
        for opcode, argument, _ in pickletools.genops(source):
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    except (ValueError, UnicodeError, OverflowError) as error:
        raise Damaged(f"its pickle is damaged ({error!s:.80})") from None
    raise Damaged("its pickle does not end")


class _Machine:
    """The stack, marks and memo of a pickle, and the opcodes that a state dict needs."""

    def __init__(self, unread: bool, limit: int) -> None:
        self.unread, self.limit = unread, limit
        self.actions = ACTIONS | UNREAD_ACTIONS if unread else ACTIONS
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.steps = self.copied = 0

    def step(self, opcode: str, argument: Any) -> None:
        self.steps += 1
        if self.steps > self.limit:
            raise Damaged(f"its pickle has more than {self.limit} opcodes")
        if opcode in CONSTANTS:
            self.stack.append(CONSTANTS[opcode])
        elif opcode in LITERALS:
            if type(argument) is int and abs(argument) >= NUMBER_LIMIT:
                raise Damaged(f"its pickle has an integer of {argument.bit_length()} bits")
            self.stack.append(argument)
        elif opcode in self.actions:
            self.actions[opcode](self, argument)
        elif opcode not in ("PROTO", "FRAME"):
            raise Damaged(f"its pickle has the opcode {opcode}, which a state dict does not need")

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise Damaged("its pickle pops from an empty stack")
        return self.stack.pop()

    def unmark(self) -> int:
        if not self.marks:
            raise Damaged("its pickle pops a missing mark")
        return self.marks.pop()

    def since_mark(self) -> list[Any]:
        mark = self.unmark()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def peek(self, kind: type) -> Any:
        """The container on top of the stack. For an unread object, a new one: what is added to it is dropped."""
        value = self.pop()
        self.stack.append(value)
        if value is UNREAD:
            return kind()
        if type(value) is not kind:
            raise Damaged(f"its pickle adds items to a value that is not a {kind.__name__}")
        return value

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def put(self, index: int | None) -> None:
        value = self.pop()
        self.stack.append(value)
        slot = len(self.memo) if index is None else index
        # Every pickler counts up from 0 or 1. Arbitrary numbers could all have the same hash.
        if not 0 <= slot <= len(self.memo) + 1:
            raise Damaged(f"its pickle stores value {len(self.memo)} in memo slot {slot!r:.20}")
        self.memo[slot] = value

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise Damaged("its pickle reads an empty memo slot")
        self.stack.append(self.memo[index])

    def append(self, items: list[Any]) -> None:
        self.peek(list).extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.peek(dict)
        if len(items) % 2:
            raise Damaged("its pickle has a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def set_item(self, _: Any) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def global_name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(self.known(module, name))

    def known(self, module: str, name: str) -> Name | Unread:
        found = Name(module, name)
        if found in BUILDERS or (module == "torch" and name in DTYPES):
            return found
        if self.unread:
            return UNREAD
        raise Damaged(f"it refers to {module + '.' + name!r:.100}, which is not part of a state dict")

    def stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise Damaged("its pickle has a global name that is not a string")
        self.stack.append(self.known(module, name))

    def storage(self, _: Any) -> None:
        self.stack.append(_make_storage(self.pop()))

    def reduce(self, _: Any) -> None:
        arguments, name = self.pop(), self.pop()
        if name is UNREAD:
            self.stack.append(UNREAD)
            return
        if type(name) is not Name or type(arguments) is not tuple or name not in BUILDERS:
            raise Damaged("its pickle calls a value that is not a known function")
        if len(arguments) > ARGUMENT_LIMIT:
            raise Damaged(f"its pickle makes a call with {len(arguments)} arguments")
        self.copied += sum(len(argument) for argument in arguments if type(argument) is list)
        # A list that is built once and copied once took more than one opcode per item.
        if self.copied > self.steps:
            raise Damaged(f"its pickle copies {self.copied} items in {self.steps} opcodes")
        self.stack.append(BUILDERS[name](arguments))

    def leave(self, count: int) -> None:
        """Pop the parts of an object that is not built, and push `UNREAD`."""
        for _ in range(count):
            self.pop()
        self.stack.append(UNREAD)

    def build(self, _: Any) -> None:
        """Drop the attributes of an OrderedDict (torch stores `_metadata` there); nothing else may have attributes."""
        self.pop()
        self.peek(dict)


def _key(key: Any) -> str | None:
    """A dict key: a string as it is, None for any other plain value.

    Python hashes strings with a secret, but numbers can be chosen to have equal hashes, and hashing a nested tuple
    recurses as deep as the file wants. Only optimizer states have such keys, and they are not used.
    """
    if type(key) not in PLAIN and key is not UNREAD:
        raise Damaged(f"its pickle has a key of type {type(key).__name__}, not a plain value")
    if type(key) is str and len(key) > KEY_LIMIT:
        raise Damaged(f"its pickle has a key of {len(key)} characters")
    return key if type(key) is str else None


def _make_storage(saved: Any) -> Storage:
    if type(saved) is not tuple or len(saved) not in (5, 6) or saved[0] not in ("storage", b"storage"):
        raise Damaged("it has a persistent id that is not a storage")
    _, kind, key, _, numel = saved[:5]
    if type(kind) is not Name or kind.name not in DTYPES or type(key) is not str or len(key) > KEY_LIMIT:
        raise Damaged("it has a storage of unknown dtype")
    if len(saved) == 6 and saved[5] is not None:
        raise Damaged("it uses storage views, an unsupported old format")
    if type(numel) is not int or not 0 <= numel <= ELEMENT_LIMIT:
        raise Damaged("it declares a storage of impossible size")
    return Storage(key, DTYPES[kind.name], numel)


def _make_tensor(arguments: tuple[Any, ...]) -> Strided:
    """`_rebuild_tensor(storage, offset, size, stride)`, and `_rebuild_tensor_v2` with further arguments."""
    if len(arguments) < 4 or type(arguments[0]) is not Storage:
        raise Damaged("it has a tensor without a storage")
    storage, offset, size, stride = arguments[:4]
    lists = all(type(axes) is tuple and len(axes) <= AXES_LIMIT for axes in (size, stride))
    if not lists or len(size) != len(stride):
        raise Damaged("it has a tensor without a valid shape")
    if not all(type(number) is int and 0 <= number <= ELEMENT_LIMIT for number in (offset, *size, *stride)):
        raise Damaged("it has a tensor of impossible size")
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    # More elements than the storage has would be repeats, with which a small file could ask for any amount of memory.
    beyond = math.prod(size) > storage.numel or last >= storage.numel
    if math.prod(count for count in size if count) > ELEMENT_LIMIT or (0 not in size and beyond):
        raise Damaged(f"it has a tensor of size {list(size)!s:.80} that exceeds its storage of {storage.numel}")
    if 0 in size and offset > storage.numel:
        raise Damaged(f"it has an empty tensor at {offset}, beyond its storage of {storage.numel}")
    return Strided(storage, offset, size, stride)


def _make_parameter(arguments: tuple[Any, ...]) -> Strided:
    if not arguments or type(arguments[0]) is not Strided:
        raise Damaged("it has a parameter that is not a tensor")
    return arguments[0]


def _make_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    """An OrderedDict: empty, as Python 3 pickles it, or from a list of [key, value] pairs, as Python 2 does."""
    pairs = arguments[0] if len(arguments) == 1 else []
    if len(arguments) > 1 or type(pairs) is not list:
        raise Damaged("it has an OrderedDict with unknown arguments")
    made: dict[Any, Any] = {}
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise Damaged("it has an OrderedDict with unknown arguments")
        made[_key(pair[0])] = pair[1]
    return made


BUILDERS: dict[Name, Callable[[tuple[Any, ...]], Any]] = {
    Name("collections", "OrderedDict"): _make_dict,
    Name("torch._utils", "_rebuild_tensor"): _make_tensor,
    Name("torch._utils", "_rebuild_tensor_v2"): _make_tensor,
    Name("torch._utils", "_rebuild_parameter"): _make_parameter,
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
NUMBERS = {"INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
LITERALS = NUMBERS | STRINGS | {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "POP_MARK": lambda machine, _: machine.since_mark().clear(),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": _Machine.set_item,
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.put,
    "GET": _Machine.get,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.global_name,
    "STACK_GLOBAL": _Machine.stack_global,
    "BINPERSID": _Machine.storage,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}
UNREAD_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "NEWOBJ": lambda machine, _: machine.leave(2),
    "NEWOBJ_EX": lambda machine, _: machine.leave(3),
    "EMPTY_SET": lambda machine, _: machine.leave(0),
    "ADDITEMS": lambda machine, _: machine.since_mark().clear(),
    "FROZENSET": lambda machine, _: machine.leave(len(machine.stack) - machine.unmark()),
}
