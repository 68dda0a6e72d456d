"""Environments of worlds: which Python has a world's package, what is said where none has, how one is made."""

import subprocess
import sys
import zipfile

import pytest

from openrlhf.cli.main import main
from openrlhf.worlds import environments
from openrlhf.worlds.environments import (
    WORLDS,
    InstallError,
    Requirements,
    WorldMissingError,
    environment_folder,
    find_python,
    install,
    install_command,
    is_world,
    requirements_of,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENRLHF_WORLDS", str(tmp_path / "worlds"))
    return tmp_path / "worlds"


def wheel(folder, version="1.0"):
    """A package of one line, as pip installs it without an index."""
    path = folder / f"tiny_world-{version}-py3-none-any.whl"
    info = f"tiny_world-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_world.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-world\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return f"tiny-world @ {path.as_uri()}"


def world_file(folder, requirement):
    file = folder / "mine.py"
    file.write_text(f"REQUIREMENTS = [{requirement!r}]\n\nclass World: ...\n")
    return str(file)


def test_every_world_names_exact_versions():
    for name, needs in WORLDS.items():
        assert (environments.Path(environments.__file__).parent / f"{name}.py").is_file(), name
        assert all("==" in package for package in needs.all), name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class World: ...", True),
        ("from my_worlds import World", True),
        ("World = make()", True),
        ("class World: ...\nclass AgentExecutor: ...", False),
        ("class AgentExecutor: ...", False),
        ("class World(", False),
    ],
)
def test_a_file_with_a_class_world_is_a_world(tmp_path, text, expected):
    file = tmp_path / "agent.py"
    file.write_text(text)
    assert is_world(str(file)) is expected


def test_a_name_is_a_world_and_a_file_that_is_not_there_is_none(tmp_path):
    assert is_world("openrlhf.worlds.gymnasium")
    assert not is_world(str(tmp_path / "absent.py"))
    assert not is_world("agent")


def test_a_missing_package_ends_in_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(WORLDS, "tiny", Requirements("for tests", ("tiny-world==1.0",), "tiny_world"))
    with pytest.raises(WorldMissingError) as error:
        find_python("openrlhf.worlds.tiny")
    assert str(error.value).endswith("Run: openrlhf worlds install tiny")
    assert "tiny-world==1.0" in str(error.value)


def test_a_name_that_no_world_has_is_told_which_there_are():
    with pytest.raises(
        WorldMissingError, match="no world 'resoning_gym': there are reasoning_gym, gymnasium, bfcl, mcp"
    ):
        find_python("openrlhf.worlds.resoning_gym")


def test_our_own_interpreter_serves_where_it_has_the_package(monkeypatch):
    monkeypatch.setitem(WORLDS, "tiny", Requirements("for tests", (), "json"))
    assert find_python("openrlhf.worlds.tiny") == environments.WorldPython(environments.Path(sys.executable))


def test_a_file_that_names_no_packages_runs_in_our_own_interpreter(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class World: ...")
    assert str(find_python(str(file)).path) == sys.executable
    assert install_command(str(file)) == ""
    with pytest.raises(InstallError, match="REQUIREMENTS"):
        install(str(file))


@pytest.mark.parametrize(
    "line", ['REQUIREMENTS = ["tiny-world==1.0"]', 'REQUIREMENTS: list[str] = ["tiny-world==1.0"]']
)
def test_a_file_names_its_packages_in_a_list(tmp_path, line):
    file = tmp_path / "mine.py"
    file.write_text(line)
    assert requirements_of(str(file)).packages == ("tiny-world==1.0",)


def test_packages_that_are_no_list_are_refused(tmp_path):
    """A text is a list of its letters to Python, and each letter would be a package."""
    file = tmp_path / "mine.py"
    file.write_text('REQUIREMENTS = "tiny-world==1.0"')
    with pytest.raises(
        WorldMissingError, match=r"mine\.py: REQUIREMENTS must be a list, as \[.*not 'tiny-world==1\.0'"
    ):
        find_python(str(file))


def test_a_file_that_is_not_there_cannot_be_installed(tmp_path, capsys):
    assert main(["worlds", "install", str(tmp_path / "absent.py")]) == 1
    assert f"there is no file {tmp_path / 'absent.py'}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPENRLHF_WORLDS", str(tmp_path / "file" / "worlds"))
    assert main(["worlds", "install", "mcp"]) == 1
    assert "cannot be made (Not a directory): name another folder in the variable OPENRLHF_WORLDS" in (
        capsys.readouterr().err
    )


def test_an_interpreter_that_was_asked_for_must_have_the_package(tmp_path):
    file = world_file(tmp_path, "tiny-world==1.0")
    with pytest.raises(WorldMissingError, match="has no package tiny_world"):
        find_python(file, wanted=sys.executable)
    with pytest.raises(WorldMissingError, match=r"--world\.python /nowhere/python: there is no such program"):
        find_python(file, wanted="/nowhere/python")


@pytest.mark.slow
def test_install_makes_an_environment_of_its_own_once(tmp_path, folder, capsys):
    """Installed is the package of the wheel, in a Python that has nothing of ours; the second time nothing is done."""
    file = world_file(tmp_path, wheel(tmp_path))
    assert main(["worlds", "install", file]) == 0
    made = capsys.readouterr().out.strip()
    assert made == str(environment_folder(file))
    python = find_python(file)
    assert python.own
    assert "PYTHONPATH" not in python.environment()
    code = "import tiny_world, importlib.util; print(tiny_world.VERSION, importlib.util.find_spec('torch'))"
    said = subprocess.run(
        [str(python.path), "-c", code], capture_output=True, text=True, check=True, env=python.environment()
    )
    assert said.stdout.split() == ["1.0", "None"]
    marker = environment_folder(file) / "bin"
    before = marker.stat().st_mtime_ns
    said = []
    install(file, say=said.append)
    assert marker.stat().st_mtime_ns == before
    assert said == [f"mine.py is installed already: {made}"]
    (environment_folder(file) / environments.DONE).unlink()  # as if it had been interrupted
    install(file)
    assert marker.stat().st_mtime_ns != before


def test_an_environment_whose_python_is_gone_is_installed_anew(tmp_path):
    """As after another version of Python was put in the place of the one that it was made with."""
    file = world_file(tmp_path, "tiny-world==1.0")
    (environment_folder(file) / "bin").mkdir(parents=True)
    (environment_folder(file) / "bin" / "python").symlink_to("/nowhere/python3")
    (environment_folder(file) / environments.DONE).write_text("{}")
    with pytest.raises(WorldMissingError, match=f"Run: openrlhf worlds install {file}$"):
        find_python(file)
    assert not environments.installed(file)


@pytest.mark.slow
def test_what_pip_says_is_the_error_and_nothing_is_left_behind(tmp_path, capsys):
    missing = f"tiny-world @ {(tmp_path / 'absent-1.0-py3-none-any.whl').as_uri()}"
    file = world_file(tmp_path, missing)
    assert main(["worlds", "install", file]) == 1
    said = capsys.readouterr().err
    assert "openrlhf worlds: error: pip could not install tiny-world" in said
    assert not environment_folder(file).exists()


def test_the_list_shows_what_each_world_needs(capsys):
    assert main(["worlds"]) == 0
    shown = capsys.readouterr().out
    assert "reasoning-gym==0.1.25" in shown
    assert "not installed (openrlhf worlds install gymnasium)" in shown
