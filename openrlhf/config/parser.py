"""From command lines and YAML files to a checked configuration. Only this file of the package knows argparse."""

import argparse
import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from openrlhf.config.aliases import Given, Vocabulary, resolve, vocabulary
from openrlhf.config.commands import ROOTS, SHORT_NAMES, Config
from openrlhf.config.fields import ConfigError
from openrlhf.config.help import described, help_of, topics
from openrlhf.config.legacy_flags import GONE, INERT
from openrlhf.config.rules import check, notes_on, require_runnable
from openrlhf.config.schema import build, flags_of, to_yaml, value_at
from openrlhf.utils import interrupts


def parse(command: str, argv: Sequence[str] | None = None, *, name: str | None = None) -> Config:
    """Configuration of `command` (a key of `ROOTS`) from its arguments, `sys.argv[1:]` by default.

    `name`: what the user called it by, `openrlhf rl`, for messages.

    Later layers win: defaults, `--config FILE.yaml`, flags. Raises `ConfigError` for anything that cannot be right.
    `--help` and `--print_config` print to stdout and raise `SystemExit(0)`; notes go to stderr.
    """
    words = vocabulary(command)
    words_given = list(sys.argv[1:] if argv is None else argv)
    _answer_help(command, words_given, name=name or f"python -m openrlhf.cli.{command}")
    blank = argparse.Namespace(given=[], config=None, print_config=False)
    found, unknown = build_parser(command).parse_known_args(words_given, namespace=blank)
    if unknown:
        raise ConfigError(_explain_unknown(unknown, words=words, name=name))
    defaults = {path: spec.default for path, spec in flags_of(command).items()}
    in_file = list(_read_file(found.config, words=words, name=name)) if found.config is not None else []
    from_file = resolve(in_file, words=words, below=defaults, note=_note)
    # A file that --print_config wrote has every flag: of a file, what differs from the default was meant.
    meant = {path: given for path, given in from_file.items() if given.value != defaults[path]}
    below = defaults | {path: given.value for path, given in from_file.items()}
    from_words = resolve(found.given, words=words, below=below, note=_note)
    config = build(command, below | {path: given.value for path, given in from_words.items()})
    check(config)
    settings = [paths for item in in_file if meant.keys() & (paths := words.sets(item))]
    settings += [words.sets(item) for item in found.given if not _by_launcher(item)]
    for line in notes_on(config, settings):
        _note(line)
    if found.print_config:
        print(to_yaml(config, {path: given.where for path, given in (meant | from_words).items()}), end="")
        raise SystemExit(0)
    return config


def configure(
    command: str,
    settings: Mapping[str, Any],
    *,
    base: Config | None = None,
    name: str | None = None,
    notes: bool = True,
) -> Config:
    """Configuration of `command` from settings by name, nested or dotted, over those of `base` (default: the defaults).

    A program's way to what `parse` makes of a command line, with the same conversions, checks and notes. `name`: what
    messages call it. `notes` False: what has no effect in a run is not said. Raises `ConfigError`.
    """
    words, specs = vocabulary(command), flags_of(command)
    below = {path: spec.default if base is None else value_at(base, path) for path, spec in specs.items()}
    given = list(_flatten(dict(settings), prefix="", path="", words=words, name=name))
    values = resolve(given, words=words, below=below, note=_note)
    config = build(command, below | {path: item.value for path, item in values.items()})
    check(config)
    for line in notes_on(config, [words.sets(item) for item in given]) if notes else ():
        _note(line)
    require_runnable(config)
    return config


def settings_in(command: str, argv: Sequence[str], *, name: str) -> dict[str, Any]:
    """The settings that a command line gives, by the names it has for them, for a tool that takes some of the flags of
    `command`. Raises `ConfigError`."""
    blank = argparse.Namespace(given=[], config=None, print_config=False)
    found, unknown = build_parser(command).parse_known_args(list(argv), namespace=blank)
    if unknown:
        raise ConfigError(_explain_unknown(unknown, words=vocabulary(command), name=name))
    return {item.name: item.raw for item in found.given}


def _answer_help(command: str, words: Sequence[str], *, name: str) -> None:
    for place, word in enumerate(words):
        flag, _, asked = word.partition("=")
        if flag in ("-h", "--help"):
            asked = asked or next(iter(words[place + 1 :]), "")
            topic = asked if asked in topics(command) else None
            print(help_of(command, build_parser(command), name=name, topic=topic), end="")
            raise SystemExit(0)


def _note(line: str) -> None:
    """Once for a run: of several processes the first says it."""
    if os.environ.get("RANK", "0") == "0" and os.environ.get("SLURM_PROCID", "0") == "0":
        print(f"note: {line}", file=sys.stderr)


def _by_launcher(item: Given) -> bool:
    """Whether a launcher gave it, beside the variable that counts."""
    return item.name == "local_rank" and item.raw == os.environ.get("LOCAL_RANK")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


class _Record(argparse.Action):
    """Appends a `Given` to `namespace.given`; conversion is left to `resolve`, which files go through as well."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        spelling = option_string or ""
        name, raw = spelling.removeprefix("--"), values
        if self.nargs == 0:
            name, raw = name.removeprefix("no-"), "false"
        elif self.nargs == "?" and values is None:
            raw = "true"
        namespace.given.append(Given(name=name, raw=raw, where=spelling))


@functools.cache
def build_parser(command: str) -> argparse.ArgumentParser:
    """Every name of the command's vocabulary as an option; `--help` shows each field once, grouped by section."""
    words, specs = vocabulary(command), flags_of(command)
    parser = _Parser(
        prog=f"python -m openrlhf.cli.{command}",
        description=described(command),
        epilog="Switches also take true or false, and --no-NAME. A name in brackets is an older one for the same flag.",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    # argparse takes -1e-6 and -inf for options; no option here begins with a single dash and a digit.
    parser._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^-inf$")
    parser.add_argument("-h", "--help", metavar="TOPIC", nargs="?", help="the flags that matter; all: all of them")
    parser.add_argument("--config", metavar="FILE", help="YAML file of defaults, nested or dotted; flags override it")
    parser.add_argument("--print_config", action="store_true", help="print the resolved configuration and exit")

    groups: dict[str, Any] = {"": parser}
    for path, spec in specs.items():
        if spec.section not in groups:
            groups[spec.section] = parser.add_argument_group(spec.section)
        older = [f"--{name}" for name in spec.flat_names]
        text = f"{spec.flag.help} (default: {spec.shown_default})" + (f" [{' '.join(older)}]" if older else "")
        _add(groups[spec.section], path, words=words, help=text.replace("%", "%%"))
    older_names = parser.add_argument_group("older names with a meaning of their own")
    for name in sorted(words.names() - specs.keys()):
        _add(older_names, name, words=words, help=_help_of_oddity(name, words=words))
    return parser


def _add(group: Any, name: str, *, words: Vocabulary, help: str) -> None:
    shape = words.shape(name)
    metavar = "BOOL" if shape.is_switch else ("X" if shape.choices is None else "{" + ",".join(shape.choices) + "}")
    nargs = "?" if shape.is_switch else ("+" if shape.count != 1 else None)
    group.add_argument(f"--{name}", action=_Record, dest="given", nargs=nargs, metavar=metavar, help=help)
    if shape.is_switch:
        group.add_argument(f"--no-{name}", action=_Record, dest="given", nargs=0, help=argparse.SUPPRESS)


def _help_of_oddity(name: str, *, words: Vocabulary) -> str:
    if name in words.value_switches:
        switch = words.value_switches[name]
        value = str(switch.on).lower() if isinstance(switch.on, bool) else switch.on
        return f"--{switch.path} {value}" + (f" --{switch.enables}" if switch.enables else "")
    if name in words.halves:
        return words.halves[name].help
    if name in INERT:
        return f"does nothing: {INERT[name]}"
    # Plain flat names and section synonyms stand beside their field already.
    return argparse.SUPPRESS


def _explain_unknown(unknown: Sequence[str], *, words: Vocabulary, name: str | None) -> str:
    """One line per unknown flag. Values are not repeated: one of them may be a key."""
    flags = [word.removeprefix("--").partition("=")[0] for word in unknown if word.startswith("--")]
    if flags:
        return "\n".join(_explain_name(f"--{flag}", flag=flag, words=words, name=name) for flag in flags)
    assigned = [word.partition("=")[0].lstrip("+") for word in unknown if "=" in word]
    known = [flag for flag in assigned if words.hint(flag) or flag in words.names()]
    if known:  # data.train_batch_size=8, as other tools write it
        return "\n".join(
            f"{flag}=… is not a flag; " + (words.hint(flag) or f"write --{flag} with its value") for flag in known
        )
    return f"{len(unknown)} value(s) without a flag: every setting needs its --name"


def _explain_name(shown: str, *, flag: str, words: Vocabulary, name: str | None) -> str:
    if flag in GONE:
        return f"{shown} is gone: {GONE[flag]}"
    if hint := words.hint(flag):
        return f"{shown} is unknown; {hint}"
    homes = [command for command in ROOTS if flag in vocabulary(command).names()]
    candidates = words.names() | {"config", "print_config", "help"}
    near = difflib.get_close_matches(flag, candidates, n=1, cutoff=0.8 if homes else 0.5)
    problem = "is unknown"
    if homes and name and name.startswith("openrlhf "):
        problem = f"belongs to {', '.join(f'openrlhf {SHORT_NAMES[home]}' for home in homes)}, not to {name}"
    elif homes:
        problem = f"belongs to {', '.join(homes)}, not to {words.command}"
    return f"{shown} {problem}; " + (f"did you mean --{near[0]}?" if near else "--help all lists all flags")


def _read_file(path: str, *, words: Vocabulary, name: str | None) -> Iterator[Given]:
    """Settings of a YAML file, whose keys are nested, dotted or flat names."""
    import yaml

    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: is not YAML: {error}") from None
    if tree is None:
        return
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: must be a mapping of names to values, not {type(tree).__name__}")
    yield from _flatten(tree, prefix="", path=path, words=words, name=name)


def _flatten(tree: dict[Any, Any], *, prefix: str, path: str, words: Vocabulary, name: str | None) -> Iterator[Given]:
    """`path`: the file that messages name; without one they name a setting as the command line does."""
    for key, value in tree.items():
        flag = f"{prefix}{key}"
        shown = f"{path}: {flag}" if path else f"--{flag}"
        if flag in words.names() and not isinstance(value, dict):
            yield Given(name=flag, raw=value, where=shown)
        elif any(known.startswith(f"{flag}.") for known in words.names()) and (
            value is None or isinstance(value, dict)
        ):
            yield from _flatten(value or {}, prefix=f"{flag}.", path=path, words=words, name=name)
        elif flag in words.names():
            raise ConfigError(f"{shown} takes a value, not a mapping")
        else:
            shown = f"{path}: key {flag}" if path else shown
            raise ConfigError(_explain_name(shown, flag=flag, words=words, name=name))


USAGE_ERROR = 2


def enter(
    command: str, argv: Sequence[str] | None, run: Callable[[Any], int | None], *, name: str | None = None
) -> int:
    """Exit status of `command`: 2 for a configuration that cannot run, else that of `run(config)` (None = 0).

    `name`: what the user called it by, `openrlhf rl`, if it was not the module's name.
    A signal that ends it gives 128 + its number, wherever it comes: 130 for Ctrl-C, 143 for SIGTERM.
    """
    with interrupts.handled():
        try:
            config = parse(command, argv, name=name)
            require_runnable(config)
            return run(config) or 0
        except ConfigError as error:
            for line in str(error).splitlines():
                print(f"{name or command}: error: {line}", file=sys.stderr)
            return USAGE_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return interrupts.exit_status()
