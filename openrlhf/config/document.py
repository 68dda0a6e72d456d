"""Writes the table of all flags: `python -m openrlhf.config.document > docs/flags.md`."""

from collections.abc import Iterator

from openrlhf.config.aliases import vocabulary
from openrlhf.config.commands import ROOTS, SHORT_NAMES
from openrlhf.config.legacy_flags import FOREIGN, GONE, INERT
from openrlhf.config.schema import FlagSpec, flags_of

INTRODUCTION = """\
# Flags

Made by `python -m openrlhf.config.document > docs/flags.md`; a test holds it up to date.

Commands: `rl` is `python -m openrlhf.cli.train_ppo_ray` (or `openrlhf rl`), `sft`, `rm` and `dpo` are
`openrlhf.cli.train_sft`, `train_rm` and `train_dpo`, then `serve-rm` (`serve_rm`) and `lora-combine` (`lora_combiner`).

- Every flag has a dotted name; the older names in the last column mean the same, also in a file.
- A switch takes nothing, `true` or `false`; `--no-NAME` switches it off.
- `--config FILE.yaml` gives defaults, with nested or dotted keys; flags override it. `--print_config` prints the
  resolved configuration in that form, with a comment beside what was set, and exits.
- `--help` shows the flags that matter most, `--help all` every flag, `--help SECTION` those of a section.
- `None` unsets a flag that may be unset. Two settings of one flag that differ are an error.
- A flag that has no effect with the others that were given is noted on stderr when the run begins, with what it needs.
- `sft`, `rm` and `dpo` also know their model and optimizer flags as `--actor.*`.
"""


def render() -> str:
    """The whole page."""
    commands: dict[str, dict[str, FlagSpec]] = {}
    for command in ("train_ppo_ray", "train_sft", "train_rm", "train_dpo", "serve_rm", "lora_combiner"):
        for path, spec in flags_of(command).items():
            commands.setdefault(path, {})[command] = spec
    sections: dict[str, list[str]] = {}
    for path, specs in commands.items():
        section = next(iter(specs.values())).section
        sections.setdefault(section, []).append(_row(path, specs))
    lines = [INTRODUCTION]
    for section, rows in sections.items():
        lines += [f"## {section or 'Top level'}\n", "| flag | type | default | commands | meaning | older names |"]
        lines += ["|---|---|---|---|---|---|", *rows, ""]
    return "\n".join([*lines, *_oddities()]) + "\n"


def _row(path: str, specs: dict[str, FlagSpec]) -> str:
    types = _by_command({command: str(spec.shape) for command, spec in specs.items()})
    defaults = _by_command({command: spec.shown_default for command, spec in specs.items()})
    older = dict.fromkeys(f"`{name}`" for spec in specs.values() for name in spec.flat_names)
    cells = (
        f"`--{path}`",
        types,
        defaults,
        " ".join(SHORT_NAMES[command] for command in specs),
        _by_command({command: _meaning(command, spec) for command, spec in specs.items()}),
        " ".join(older),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _meaning(command: str, spec: FlagSpec) -> str:
    """With the flag that must be on for it, where there is one."""
    own = spec.only_with[len(spec.only_with) - len(spec.flag.only_with.split()) :]
    parents = [f"`--{name}`" for name in own if name in flags_of(command)]
    return spec.flag.help + (f" (with {' and '.join(parents)})" if parents else "")


def _by_command(texts: dict[str, str]) -> str:
    """One text where all commands agree, else `sft: 8; rl: 1`."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{SHORT_NAMES[command]}: {text}" for command, text in texts.items())


def _oddities() -> Iterator[str]:
    yield "## Older names with a meaning of their own\n"
    yield "| name | means |"
    yield "|---|---|"
    meanings: dict[str, str] = {}
    for command in ROOTS:
        words = vocabulary(command)
        for name, switch in words.value_switches.items():
            also = f" `--{switch.enables}`" if switch.enables else ""
            meanings[name] = f"`--{switch.path} {str(switch.on).lower()}`{also}"
        meanings |= {name: half.help for name, half in words.halves.items()}
    meanings["ptx_coef"] = "0 only, which does nothing"
    meanings |= {name: f"does nothing: {why}" for name, why in INERT.items()}
    meanings |= {name: f"gone: {remedy}" for name, remedy in GONE.items()}
    for name, meaning in meanings.items():
        yield f"| `--{name}` | {meaning} |"
    yield from _foreign_names()


def _foreign_names() -> Iterator[str]:
    yield "\n## Names of other tools\n"
    yield "These mean the same here; a command has the first that it knows. Other names that TRL, verl or transformers'"
    yield "trainer have lead to an error that says what to use. `--algo.advantage.estimator` also takes `grpo`"
    yield "(`group_norm`), `ppo` (`gae`), `reinforce++` and `reinforce++-baseline`.\n"
    yield "| name | means |"
    yield "|---|---|"
    for name, paths in FOREIGN.items():
        yield f"| `--{name}` | {' or '.join(f'`--{path}`' for path in paths.split())} |"


if __name__ == "__main__":
    print(render(), end="")
