"""What is made of parts that stand in no `__dict__`: a change of one is found."""

import abc
import functools
import types
from importlib.machinery import FileFinder, SourceFileLoader

import pytest

from memlab.runtime.fingerprint import Fingerprint


class Base:
    pass


class Other:
    pass


def library():
    """Return a module with one of each kind."""
    module = types.ModuleType("library")
    module.__file__ = __file__

    class Layer(Base):
        pass

    class Abstract(abc.ABC):
        @abc.abstractmethod
        def run(self):
            """Left to those that are registered."""

    def counted(times):
        def count():
            return times

        return count

    @functools.singledispatch
    def dispatching(value):
        return value

    module.Layer, module.Abstract, module.count = Layer, Abstract, counted(2)
    module.dispatching, module.setting = dispatching, Base()
    for value in (Layer, Abstract, module.count, dispatching):
        value.__module__, value.__qualname__ = "library", value.__qualname__.rpartition(".")[2]
    return module


def other_bases(module):
    module.Layer.__bases__ = (Other,)


def other_class(module):
    module.setting.__class__ = Other


def class_of_the_module(module):
    module.__class__ = type("Module", (types.ModuleType,), {})


def cell(module):
    module.count.__closure__[0].cell_contents = 3


def code(module):
    module.count.__code__ = (lambda times: lambda: times * 2)(0).__code__


def registered(module):
    module.Abstract.register(Other)


def dispatched(module):
    module.dispatching.register(int, lambda value: -value)


CHANGES = {
    other_bases: "library.Layer.__bases__",
    other_class: "library.setting.__class__",
    class_of_the_module: "library.__class__",
    cell: "library.count.times",
    code: "library.count",
    registered: "library.Abstract.register",
    dispatched: "library.dispatching.register",
}


def noted(module, *, is_own=False):
    fingerprint = Fingerprint()
    fingerprint.note("library", module, is_own=is_own)
    fingerprint.begin()
    return fingerprint


def found(fingerprint):
    return [name for name in fingerprint.changes() if not name.startswith("sys.modules")]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_what_stands_in_no_dict_is_found(change):
    module = library()
    fingerprint = noted(module)
    assert found(fingerprint) == []
    change(module)
    assert found(fingerprint) == [CHANGES[change]]


@pytest.mark.parametrize("change", [other_bases, cell, registered], ids=lambda c: c.__name__)
def test_what_the_import_of_a_library_changes_is_accepted_and_what_was_before_is_not(change):
    module = library()
    fingerprint = noted(module)
    before = fingerprint.before_import()
    change(module)
    fingerprint.after_import({"library"}, before)
    assert found(fingerprint) == []

    module = library()
    fingerprint = noted(module)
    change(module)
    fingerprint.after_import({"library"}, fingerprint.before_import())
    assert found(fingerprint) == [CHANGES[change]]


def test_what_python_knows_of_a_folder_is_no_change(tmp_path):
    """A loop over `pkgutil.iter_modules` leaves such a finder in its module: in triton's."""
    module = library()
    module.finder = FileFinder(str(tmp_path), (SourceFileLoader, [".py"]))
    assert module.finder.find_spec("later") is None
    fingerprint = noted(module)
    (tmp_path / "later.py").touch()
    module.finder.invalidate_caches()
    assert module.finder.find_spec("later")
    assert found(fingerprint) == []
    module.finder.path = str(tmp_path.parent)
    assert found(fingerprint) == ["library.finder.path"]


def test_nothing_of_a_persons_own_module_is_accepted():
    module = library()
    fingerprint = noted(module, is_own=True)
    before = fingerprint.before_import()
    cell(module)
    fingerprint.after_import({"library"}, before)
    assert found(fingerprint) == [CHANGES[cell]]
