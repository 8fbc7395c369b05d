"""The pickle machine, reduced to what a state dict needs, and unable to execute.

Opcodes are read with `pickletools.genops`, which runs nothing. Values are dicts, lists, tuples and plain values; a
name in the pickle is compared with the few known here and never imported, looked up or called. An object of any other
kind is refused, or where the caller wants to read what lies beside it, left unread as `UNREAD`.

Memory and time are bounded by the size of the file. An opcode takes at least a byte and does a fixed amount of work,
with two exceptions that are limited here: a call that copies a list, since the memo can hand the same list to any
number of calls, and a dict look-up, whose cost the file would otherwise choose by its keys.
"""

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# A state dict needs about 40 opcodes per tensor; past this the file is no state dict.
OPCODE_LIMIT = 2_000_000
# A vocabulary needs six per word: a list of words, a dict from word to id and one from word to count.
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
    """What is wrong with the file, in a few words; the reader turns it into a sentence."""


@dataclass(frozen=True)
class Name:
    """A name found in a pickle. It stands for itself; nothing is looked up."""

    module: str
    name: str


class Unread:
    """Stands for every object that the machine does not build."""


UNREAD = Unread()


@dataclass(frozen=True)
class Storage:
    """A stretch of numbers, named in the pickle and stored elsewhere in the file."""

    key: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Strided:
    """A tensor as the pickle describes it: a view of a storage."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def run(source: Any, *, unread: bool = False, limit: int | None = None) -> Any:
    """What one pickle describes, built by this module alone; `source` is bytes, or has read, readline and tell.

    Where `unread`, objects of other kinds are `UNREAD`; otherwise they are refused."""
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
    """The stack, the marks and the memo of a pickle, for the opcodes a state dict needs and no other."""

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
            raise Damaged(f"its pickle is longer than {self.limit} opcodes")
        if opcode in CONSTANTS:
            self.stack.append(CONSTANTS[opcode])
        elif opcode in LITERALS:
            if type(argument) is int and abs(argument) >= NUMBER_LIMIT:
                raise Damaged(f"its pickle has a whole number of {argument.bit_length()} bits")
            self.stack.append(argument)
        elif opcode in self.actions:
            self.actions[opcode](self, argument)
        elif opcode not in ("PROTO", "FRAME"):
            raise Damaged(f"its pickle uses {opcode}, which no state dict needs")

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise Damaged("its pickle takes more than it puts")
        return self.stack.pop()

    def unmark(self) -> int:
        if not self.marks:
            raise Damaged("its pickle lacks a mark")
        return self.marks.pop()

    def since_mark(self) -> list[Any]:
        mark = self.unmark()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def peek(self, kind: type) -> Any:
        """The value on top, to put something into; what is put into an object that is not read goes nowhere."""
        value = self.pop()
        self.stack.append(value)
        if value is UNREAD:
            return kind()
        if type(value) is not kind:
            raise Damaged(f"its pickle puts something into what is no {kind.__name__}")
        return value

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def put(self, index: int | None) -> None:
        value = self.pop()
        self.stack.append(value)
        place = len(self.memo) if index is None else index
        # Every pickler counts up, from 0 or from 1; chosen numbers could all collide in a dict.
        if not 0 <= place <= len(self.memo) + 1:
            raise Damaged(f"its pickle keeps value {len(self.memo)} under the number {place!r:.20}")
        self.memo[place] = value

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise Damaged("its pickle recalls what it never kept")
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
        raise Damaged(f"it asks for {module + '.' + name!r:.100}, which is not run")

    def stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise Damaged("its pickle names something without a name")
        self.stack.append(self.known(module, name))

    def storage(self, _: Any) -> None:
        self.stack.append(_make_storage(self.pop()))

    def reduce(self, _: Any) -> None:
        arguments, name = self.pop(), self.pop()
        if name is UNREAD:
            self.stack.append(UNREAD)
            return
        if type(name) is not Name or type(arguments) is not tuple or name not in BUILDERS:
            raise Damaged("its pickle calls what cannot be called")
        if len(arguments) > ARGUMENT_LIMIT:
            raise Damaged(f"its pickle makes a call with {len(arguments)} arguments")
        self.copied += sum(len(argument) for argument in arguments if type(argument) is list)
        # Whoever writes a list once and copies it once took more than one opcode for each of its items.
        if self.copied > self.steps:
            raise Damaged(f"its pickle copies {self.copied} items in {self.steps} opcodes")
        self.stack.append(BUILDERS[name](arguments))

    def leave(self, count: int) -> None:
        """Of an object that is not read: its parts are taken from the stack."""
        for _ in range(count):
            self.pop()
        self.stack.append(UNREAD)

    def build(self, _: Any) -> None:
        """An OrderedDict's attributes (torch keeps `_metadata` there) are not needed; nothing else has any."""
        self.pop()
        self.peek(dict)


def _key(key: Any) -> str | None:
    """A key of a dict. Strings are hashed with a secret; of any other key only the fact that there was one is kept.

    Those a state dict does not have, an optimizer's may. Numbers can be chosen to collide, and to hash a deep tuple is
    to recurse as deep as a file likes.
    """
    if type(key) not in PLAIN and key is not UNREAD:
        raise Damaged("its pickle has a key that is no plain value")
    if type(key) is str and len(key) > KEY_LIMIT:
        raise Damaged(f"its pickle has a key of {len(key)} characters")
    return key if type(key) is str else None


def _make_storage(saved: Any) -> Storage:
    if type(saved) is not tuple or len(saved) not in (5, 6) or saved[0] not in ("storage", b"storage"):
        raise Damaged("it refers to something that is no storage")
    _, kind, key, _, numel = saved[:5]
    if type(kind) is not Name or kind.name not in DTYPES or type(key) is not str or len(key) > KEY_LIMIT:
        raise Damaged("it describes a storage of no known kind")
    if len(saved) == 6 and saved[5] is not None:
        raise Damaged("it holds a view of a storage, as only very old files do")
    if type(numel) is not int or not 0 <= numel <= ELEMENT_LIMIT:
        raise Damaged("it declares a storage of no possible size")
    return Storage(key, DTYPES[kind.name], numel)


def _make_tensor(arguments: tuple[Any, ...]) -> Strided:
    """`_rebuild_tensor(storage, offset, size, stride)`, and its second form with gradient and hooks behind them."""
    if len(arguments) < 4 or type(arguments[0]) is not Storage:
        raise Damaged("it describes a tensor without a storage")
    storage, offset, size, stride = arguments[:4]
    lists = all(type(axes) is tuple and len(axes) <= AXES_LIMIT for axes in (size, stride))
    if not lists or len(size) != len(stride):
        raise Damaged("it describes a tensor without a shape")
    if not all(type(number) is int and 0 <= number <= ELEMENT_LIMIT for number in (offset, *size, *stride)):
        raise Damaged("it describes a tensor of no possible shape")
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    # More elements than the storage has would be repeats, which a small file could use to ask for any memory.
    beyond = math.prod(size) > storage.numel or last >= storage.numel
    if math.prod(count for count in size if count) > ELEMENT_LIMIT or (0 not in size and beyond):
        raise Damaged("it describes a tensor that reaches beyond its storage")
    if 0 in size and offset > storage.numel:
        raise Damaged("it describes an empty tensor beyond its storage")
    return Strided(storage, offset, size, stride)


def _make_parameter(arguments: tuple[Any, ...]) -> Strided:
    if not arguments or type(arguments[0]) is not Strided:
        raise Damaged("it describes a parameter that is no tensor")
    return arguments[0]


def _make_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    """Empty, as Python 3 pickles it, or a list of [key, value] pairs, as Python 2 does."""
    pairs = arguments[0] if len(arguments) == 1 else []
    if len(arguments) > 1 or type(pairs) is not list:
        raise Damaged("it describes a dict in a way of its own")
    made: dict[Any, Any] = {}
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise Damaged("it describes a dict in a way of its own")
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
