"""Names that are found, names that are nearly right, and a user's object by address."""

import functools
import sys
import types

import pytest

from verl.registry import Registry, did_you_mean, import_module, load_object


@pytest.mark.parametrize(
    ("name", "known", "message"),
    [
        ("gpro", ["ppo", "grpo", "rloo"], "did you mean 'grpo'? known: grpo, ppo, rloo"),
        ("xyz", ["ppo", "grpo"], "known: grpo, ppo"),
        ("x", [], "known: (none)"),
        (3, ["ppo"], "known: ppo"),
    ],
)
def test_did_you_mean(name, known, message):
    assert did_you_mean(name, known) == message


# ---- the table ------------------------------------------------------------------------------------------------------


def vanilla(x):
    return x


def test_register_and_look_up():
    losses = Registry("loss")
    assert losses.register("vanilla", vanilla) is vanilla

    @losses.register("mine")
    def mine(x):
        return -x

    assert losses["mine"] is mine and mine(2) == -2
    assert "mine" in losses and "yours" not in losses
    assert list(losses) == ["vanilla", "mine"] and len(losses) == 2
    assert list(losses.items()) == [("vanilla", vanilla), ("mine", mine)]


def test_an_unknown_name_lists_the_registered_ones():
    losses = Registry("policy loss")
    losses.register("vanilla", vanilla)
    with pytest.raises(ValueError, match=r"no policy loss is called 'vanila': did you mean 'vanilla'\? known: vanilla"):
        losses["vanila"]


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_is_a_word(name):
    with pytest.raises(ValueError, match="loss name: expected a non-empty string, found"):
        Registry("loss").register(name, vanilla)


def test_another_object_does_not_take_a_name():
    losses = Registry("loss")
    losses.register("vanilla", vanilla)
    with pytest.raises(ValueError, match=r"loss 'vanilla' is already registered as .*test_registry\.vanilla: choose"):
        losses.register("vanilla", lambda x: x)
    assert losses["vanilla"] is vanilla


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda x: x,
        lambda: functools.partial(vanilla, 1),
        lambda: types.SimpleNamespace(),
    ],
    ids=["lambdas", "partials", "instances"],
)
def test_objects_that_only_look_alike_are_told_apart(make):
    table = Registry("thing")
    first = table.register("x", make())
    table.register("x", first)
    with pytest.raises(ValueError, match="is already registered"):
        table.register("x", make())


def test_the_same_definition_may_be_loaded_again():
    """A reloaded module, a notebook cell that is run twice: the later definition stands."""
    source = "def loss(x):\n    return x\nclass Manager:\n    pass\n"
    losses, managers, loads = Registry("loss"), Registry("manager"), []
    for _ in range(2):
        namespace = {"__name__": "users_module"}
        exec(source, namespace)
        loads.append(namespace)
        losses.register("mine", namespace["loss"])
        managers.register("mine", namespace["Manager"])
    assert losses["mine"] is loads[1]["loss"] and managers["mine"] is loads[1]["Manager"]


# ---- by address -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the import path; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_is_loaded_once(folder):
    path = folder / "reward.py"
    path.write_text("runs = []\nruns.append(1)\ndef compute_score(x):\n    return len(runs)\n")
    assert load_object(str(path), "compute_score")(None) == 1
    assert import_module(str(path)) is import_module(f"{folder}/../{folder.name}/reward.py")
    assert load_object(str(path), "runs") == [1]


def test_a_file_that_was_edited_is_loaded_again(folder):
    """As in a notebook: within a second, with the same number of characters, and with the objects it registers."""
    registry, path = Registry("loss"), folder / "edited.py"
    for value in (1, 2):
        path.write_text(f"def loss():\n    return {value}\n")
        registry.register("edited", load_object(str(path), "loss"))
        assert registry["edited"]() == value


def test_two_files_of_one_name_are_two_modules(folder):
    """Also where only the separators differ."""
    paths = [folder / "a" / "b" / "c.py", folder / "a" / "b_c.py", folder / "a-b" / "c.py", folder / "a_b" / "c.py"]
    for i, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"number = {i}\n")
    assert [load_object(str(path), "number") for path in paths] == [0, 1, 2, 3]


def test_a_file_that_ends_the_process_is_an_error(folder):
    (folder / "script.py").write_text("import sys\nsys.exit(0)\n")
    for address in (str(folder / "script.py"), "script"):
        with pytest.raises(ValueError, match=r"script.* calls sys.exit\(0\) while it is imported: .*__main__"):
            import_module(address)


def test_a_dotted_module(folder):
    (folder / "users_pkg").mkdir()
    (folder / "users_pkg" / "__init__.py").write_text("")
    (folder / "users_pkg" / "losses.py").write_text("def mine():\n    return 7\n")
    assert load_object("users_pkg.losses", "mine")() == load_object("pkg://users_pkg.losses", "mine")() == 7


def test_a_file_that_is_also_a_module_registers_the_same_definition(folder):
    (folder / "both.py").write_text("def loss():\n    return 1\n")
    registry = Registry("loss")
    for address in ("both", str(folder / "both.py")):
        registry.register("mine", load_object(address, "loss"))
    (folder / "third.py").write_text("def loss():\n    return 1\n")
    with pytest.raises(ValueError, match="'mine' is already registered"):
        registry.register("mine", load_object("third", "loss"))


def test_names_that_a_package_loads_at_first_use():
    from verl.protocol import DataProto

    assert load_object("verl", "DataProto") is DataProto


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", r"expected a module name or the path to a .py file, found ''"),
        *(
            (name, f"no module '{name}': expected a dotted module name")
            for name in ("no_such_module", "json.no_such_part")
        ),
        ("no_such_package.module", "no module 'no_such_package.module': expected a dotted module name"),
        *(
            (path, rf"no file '{path}' \(looked at /.*\): expected a path to a \.py file")
            for path in ("no_such_file.py", "some/where.py", "some/where", "./README.md")
        ),
    ],
)
def test_an_address_of_nothing(address, message):
    with pytest.raises(ValueError, match=message):
        import_module(address)


def test_what_the_users_code_raises_comes_through(folder):
    """A dependency that is missing inside the module must not read as the module missing."""
    (folder / "users_dep.py").write_text("import no_such_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        import_module("users_dep")
    (folder / "users_bug.py").write_text("1 / 0\n")
    for _ in range(2):  # a module that failed is not taken for a loaded one
        with pytest.raises(ZeroDivisionError):
            import_module(str(folder / "users_bug.py"))


def test_a_wrong_name_lists_the_public_ones(folder):
    path = folder / "reward.py"
    path.write_text("def compute_score(): ...\ndef _hidden(): ...\n")
    with pytest.raises(
        ValueError, match=r"defines no 'compute_scores': did you mean 'compute_score'\? known: compute_score$"
    ):
        load_object(str(path), "compute_scores")


def test_a_users_object_may_replace_a_builtin_one_where_the_registry_says_so(caplog):
    caplog.set_level("INFO", "verl.registry")
    losses = Registry("loss", builtins_replaceable=True)
    builtin = types.FunctionType(vanilla.__code__, {"__name__": "verl.losses"}, "vanilla")
    losses.register("vanilla", builtin)
    losses.register("vanilla", vanilla)
    assert losses["vanilla"] is vanilla
    (line,) = caplog.messages
    assert line.startswith("loss 'vanilla': vanilla() at ") and line.count(f"{__file__}:") == 2
    for taken in (lambda x: x, builtin):
        with pytest.raises(ValueError, match=r"registered as tests\.test_registry\.vanilla: choose another name"):
            losses.register("vanilla", taken)
