"""Objects of classes that are not installed here go through resharding: whoever has the classes gets them back.

The classes are modules of a folder that only the saving and the comparing process have on their path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.torchfile.file_index import open_torch_file
from tests.running import FIXTURES, reshard_here

ROOT = Path(__file__).parents[2]
SOURCE = FIXTURES / "mp2dp2-fp16-fused"

# As metaseq has it: its state is bytes and a number.
LOCKING_ARRAY = """
import threading
class LockingArray:
    def __init__(self, data, num_workers):
        self.data, self.num_workers, self.locks = bytearray(data), num_workers, [threading.Lock()] * num_workers
    def __getstate__(self):
        return bytes(self.data), self.num_workers
    def __setstate__(self, state):
        self.__init__(*state)
    def __eq__(self, other):
        return type(other) is LockingArray and self.__getstate__() == other.__getstate__()
"""

CLASSES = """
import collections, copyreg, dataclasses, datetime, decimal, enum, fractions, functools, operator, pathlib, random, re
import uuid
from typing import NamedTuple
import numpy, torch

class Plain:
    def __init__(self, **values):
        self.__dict__.update(values)
    def __eq__(self, other):
        return type(self) is type(other) and vars(self) == vars(other)
    __hash__ = None

class Key:
    def __init__(self, name):
        self.name = name
    def __eq__(self, other):
        return type(other) is Key and self.name == other.name
    def __hash__(self):
        return hash(self.name)
    def __reduce__(self):
        return Key, (self.name,)

class Reduced(Plain):
    def __reduce__(self):
        return make_reduced, (self.a, [self.b])

def make_reduced(a, b):
    return Reduced(a=a, b=b[0])

class WithState(Plain):
    def __getstate__(self):
        return ("version 3", sorted(self.__dict__.items()))
    def __setstate__(self, state):
        assert state[0] == "version 3"
        self.__dict__.update(state[1])

class FalseState(Plain):
    # A state that is false is not set by pickle of old, so it must not come to be set.
    def __reduce__(self):
        return FalseState, (), 0
    def __setstate__(self, state):
        self.seen = state
    def __eq__(self, other):
        return type(other) is FalseState

class Slots:
    __slots__ = ("a", "b", "missing")
    def __init__(self, a, b):
        self.a, self.b = a, b
    def __eq__(self, other):
        return type(other) is type(self) and (self.a, self.b) == (other.a, other.b) and not hasattr(other, "missing")

class SlotsAndDict(Slots):
    pass

class NewArguments(Plain):
    def __new__(cls, size):
        made = object.__new__(cls)
        made.size = size
        return made
    def __init__(self, size): pass
    def __getnewargs__(self):
        return (self.size,)

class NewKeywords(Plain):
    def __new__(cls, *, size):
        made = object.__new__(cls)
        made.size = size
        return made
    def __init__(self, size): pass
    def __getnewargs_ex__(self):
        return (), {"size": self.size}

class Outer:
    class Inner(Plain):
        class Innermost(Plain):
            pass

class MyDict(dict):
    pass

class MyList(list):
    pass

class MySet(set):
    pass

class MyTuple(tuple):
    pass

class MyInt(int):
    pass

class MyStr(str):
    pass

class MyOrdered(collections.OrderedDict):
    pass

class Colour(enum.Enum):
    RED = 1

class Flags(enum.IntFlag):
    A = 1
    B = 2

@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: tuple

@dataclasses.dataclass(slots=True)
class Slotted:
    a: int
    b: list

class Point(NamedTuple):
    x: int
    y: str

Pair = collections.namedtuple("Pair", "one two")

def twice(value):
    return 2 * value

def with_attribute(made, **attributes):
    vars(made).update(attributes)
    return made

def objects():
    shared = Plain(name="shared")
    circle = Plain(name="circle")
    circle.itself, circle.holder = circle, [circle]
    tensor = torch.arange(6.0).view(2, 3)
    made = {
        "plain": Plain(a=1, b=[2, {"c": (3, None)}]),
        "plain in plain": Plain(a=Plain(b=Plain(c=[Plain()]))),
        "no state": Plain(),
        "reduced": Reduced(a=1, b="x"),
        "state": WithState(a=1, b=None),
        "false state": FalseState(),
        "slots": Slots(1, [2]),
        "slots and dict": with_attribute(SlotsAndDict(1, 2), c=3),
        "new arguments": NewArguments(7),
        "new keywords": NewKeywords(size=8),
        "nested": Outer.Inner(a=Outer.Inner.Innermost(b=1)),
        "a nested class": Outer.Inner.Innermost,
        "a class": Plain,
        "a function": twice,
        "a bound method": Plain(a=1).__eq__,
        "dict": with_attribute(MyDict(a=1, b=[2]), c=3),
        "great dict": MyDict((str(n), n) for n in range(2500)),
        "list": with_attribute(MyList([1, "a", None]), c=3),
        "great list": MyList(range(2500)),
        "set": MySet("abc"),
        "tuple": MyTuple((1, 2)),
        "int": MyInt(5),
        "str": MyStr("five"),
        "ordered": with_attribute(MyOrdered(b=1, a=2), c=3),
        "enum": Colour.RED,
        "flags": Flags.A | Flags.B,
        "frozen": Frozen(1, (2,)),
        "slotted": Slotted(1, [2]),
        "named tuple": Point(1, "y"),
        "older named tuple": Pair(1, [2]),
        "numpy scalar": numpy.float32(1.5),
        "numpy integer": numpy.int64(-3),
        "numpy array": numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
        "numpy array in columns": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        "numpy text": numpy.array(["a", "bc"]),
        "numpy objects": numpy.array([Key("a"), None], dtype=object),
        "numpy record": numpy.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "numpy dtype": numpy.dtype("float16"),
        "numpy empty": numpy.zeros((0, 3)),
        "defaultdict": collections.defaultdict(list, a=[1]),
        "defaultdict of a class": collections.defaultdict(Plain, a=Plain(b=1)),
        "deque": collections.deque([1, 2], maxlen=5),
        "counter": collections.Counter("aab"),
        "ordered dict": collections.OrderedDict(z=1, a=2),
        "datetime": datetime.datetime(2022, 5, 2, 12, 30, tzinfo=datetime.timezone.utc),
        "timedelta": datetime.timedelta(seconds=5),
        "path": pathlib.PurePosixPath("/a/b"),
        "decimal": decimal.Decimal("1.50"),
        "fraction": fractions.Fraction(1, 3),
        "uuid": uuid.UUID(int=5),
        "pattern": re.compile("a+", re.I),
        "complex": 1 + 2j,
        "range": range(1, 9, 2),
        "slice": slice(1, 2),
        "bytearray": bytearray(b"abc"),
        "bytes": b"\\x00\\xff",
        "one byte": b"a",
        "empty bytes": b"",
        "sets": [{1, "a"}, frozenset({2, (3, 4)}), set(), frozenset()],
        "partial": functools.partial(twice, value=3),
        "getter": operator.itemgetter(1, "a"),
        "random state": random.Random(5).getstate(),
        "keys": {Key("a"): 1, (1, "b"): 2, Colour.RED: 3, None: 4, 1.5: 5, frozenset({1}): 6, True: 7, b"k": 8},
        "shared": [shared, {"again": shared}, shared],
        "circle": circle,
        "great numbers": [2**31, -2**31 - 1, 2**63, -2**200, 2**3000],
        "floats": [float("inf"), -0.0, 1e-320],
        "text": ["", "a\\nb", "\\ud800", "\\U0001f600", "x" * 70000],
        "tensor in an object": Plain(tensor=tensor, again=[tensor, tensor[1]]),
        "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "module": torch.nn.Linear(2, 1, bias=False),
        "empty containers": [(), [], {}],
        "a very long name " + "n" * 300: "n" * 300,
    }
    torch.manual_seed(0)
    torch.nn.init.ones_(made["module"].weight)
    return made

def same(one, other, seen=()):
    assert type(one) is type(other), (type(one), type(other))
    if (id(one), id(other)) in seen:
        return
    seen = (*seen, (id(one), id(other)))
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad
    elif isinstance(one, numpy.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.size == 0 or one.strides == other.strides
        assert (one == other).all()
    elif isinstance(one, (functools.partial, torch.nn.Module, operator.itemgetter)):
        same(one.__reduce_ex__(2)[1:3], other.__reduce_ex__(2)[1:3], seen)
    elif isinstance(one, Plain) and type(one).__eq__ is Plain.__eq__:
        same(vars(one), vars(other), seen)
    elif isinstance(one, (list, tuple, collections.deque)):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            same(left, right, seen)
        same(getattr(one, "__dict__", None), getattr(other, "__dict__", None), seen)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert [type(key) for key in one] == [type(key) for key in other]
        for key in one:
            same(one[key], other[key], seen)
        same(getattr(one, "__dict__", None), getattr(other, "__dict__", None), seen)
        assert getattr(one, "default_factory", 0) is getattr(other, "default_factory", 0)
    elif isinstance(one, types_of_bound):
        same(one.__self__, other.__self__, seen)
    elif isinstance(one, float):
        assert one.hex() == other.hex()
    else:
        assert one == other, (one, other)

types_of_bound = (type(Plain().__eq__),)
"""

SAVE = """
import sys
from pathlib import Path
import torch
from private_classes import objects
from metaseq.data.document_to_sequence import LockingArray
from tests.running import load
source, target, protocol = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
for path in sorted(source.glob("checkpoint_last-*.pt")):
    root = load(path)
    made = objects()
    root["extra_state"]["unknown"] = made
    root["task_state"] = {"state": made["plain"], "again": made["numpy array"]}
    root["optimizer_history"][-1]["lr_scheduler_state"] = {"best": made["numpy scalar"]}
    root["something else"] = made["nested"]
    root["cfg"]["common"]["unknown"] = made["enum"]
    if path.name == "checkpoint_last-model_part-0-shard0.pt":
        root["extra_state"]["train_iterator"]["tokenization_cache"] = LockingArray(bytes(range(200)), 3)
    torch.save(root, target / path.name, pickle_protocol=protocol)
"""

COMPARE = """
import sys
from pathlib import Path
import torch
from private_classes import objects, same
from metaseq.data.document_to_sequence import LockingArray
folder = Path(sys.argv[1])
paths = sorted(folder.glob("*.pt"))
for path in paths:
    root = torch.load(path, weights_only=False)
    found, made = root["extra_state"]["unknown"], objects()
    assert list(found) == list(made)
    for name in made:
        try:
            same(made[name], found[name])
        except Exception as fault:
            raise AssertionError(f"{path.name}: {name}") from fault
    assert found["shared"][0] is found["shared"][1]["again"] is found["shared"][2]
    assert found["circle"].itself is found["circle"].holder[0] is found["circle"]
    tensors = found["tensor in an object"]
    assert tensors.tensor is tensors.again[0]
    assert tensors.again[1].untyped_storage().data_ptr() == tensors.tensor.untyped_storage().data_ptr()
    assert root["task_state"]["state"] is found["plain"]
    assert root["task_state"]["again"] is found["numpy array"]
    assert root["something else"] is found["nested"]
    assert root["cfg"]["common"]["unknown"] is found["enum"]
    cache = root["extra_state"]["train_iterator"].get("tokenization_cache")
    if path == paths[0]:
        assert cache == LockingArray(bytes(range(200)), 3)
    else:
        assert cache is None, path
print(len(paths), "files are as they should be")
"""


def run(script: str, classes: Path, *arguments: object) -> str:
    path = {"PYTHONPATH": os.pathsep.join([str(classes), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)],
        env={**os.environ, **path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes")
    (folder / "private_classes.py").write_text(CLASSES)
    (folder / "metaseq" / "data").mkdir(parents=True)
    (folder / "metaseq" / "data" / "document_to_sequence.py").write_text(LOCKING_ARRAY)
    return folder


@pytest.fixture(scope="module", params=[2, 4, 5], ids="protocol {}".format)
def source(request: pytest.FixtureRequest, classes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    run(SAVE, classes, SOURCE, folder, request.param)
    return folder


@pytest.mark.parametrize(("mp", "dp", "flat"), [(1, 3, True), (2, 1, False), (2, 2, True)], ids=str)
def test_unknown_objects_come_back_equal(
    source: Path, classes: Path, mp: int, dp: int, flat: bool, tmp_path: Path
) -> None:
    before = set(sys.modules)
    reshard_here(source, tmp_path, mp=mp, dp=dp, flat=flat, prefix="re", keep_state=True)
    assert not {name for name in sys.modules if name.startswith(("private_classes", "metaseq"))}
    assert not {
        name for name in set(sys.modules) - before if name.partition(".")[0] in ("decimal", "fractions", "uuid")
    }
    assert run(COMPARE, classes, tmp_path) == f"{mp * dp} files are as they should be\n"


def test_a_second_resharding_changes_nothing_more(source: Path, classes: Path, tmp_path: Path) -> None:
    reshard_here(source, tmp_path / "one", mp=1, dp=1, flat=False, prefix="re")
    reshard_here(tmp_path / "one", tmp_path / "two", mp=1, dp=1, flat=False, prefix="re")
    assert (tmp_path / "one" / "re.pt").read_bytes() == (tmp_path / "two" / "re.pt").read_bytes()
    assert run(COMPARE, classes, tmp_path / "two") == "1 files are as they should be\n"


def test_state_of_the_first_rank_is_named_in_no_other_file(source: Path, tmp_path: Path) -> None:
    reshard_here(source, tmp_path, mp=2, dp=3, flat=True, prefix="re")
    holders = []
    for path in sorted(tmp_path.glob("*.pt")):
        data = path.read_bytes()
        root: Any = open_torch_file(lambda at, size, data=data: data[at : at + size], len(data), path.name).root
        holders += [path.name] if b"LockingArray" in data else []
        assert root["extra_state"]["train_iterator"]["epoch"] == 1
    assert holders == ["re-model_part-0-shard0.pt"]
