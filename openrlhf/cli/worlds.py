"""`openrlhf worlds`: the worlds there are, and the environments that their packages live in."""

import argparse
import sys
from collections.abc import Sequence

from openrlhf.worlds.environments import (
    WORLDS,
    InstallError,
    WorldMissingError,
    environment_folder,
    install,
    installed,
    worlds_folder,
)

DESCRIPTION = f"""\
Worlds are environments of existing packages that a run trains in with
`--train.agent_func_path openrlhf.worlds.NAME`. Each package lives in a virtual environment of its own, in
{worlds_folder()} (the variable OPENRLHF_WORLDS names another folder). On a cluster the machine of the driver plays, and
needs it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="openrlhf worlds", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("list", help="the worlds, what each needs, and whether it is installed (the default)")
    adding = commands.add_parser("install", help="make the environments of worlds")
    adding.add_argument(
        "names", nargs="+", metavar="NAME", help=f"{', '.join(WORLDS)}, or your file that says REQUIREMENTS = [...]"
    )
    adding.add_argument("--again", action="store_true", help="make it anew where there is one")
    given = parser.parse_args(argv)
    if given.command != "install":
        return show()
    try:
        for name in given.names:
            print(install(name, again=given.again, say=lambda text: print(text, file=sys.stderr, flush=True)))
    except (InstallError, WorldMissingError) as error:
        print(f"openrlhf worlds: error: {error}", file=sys.stderr)
        return 1
    return 0


def show() -> int:
    """Print the list."""
    width = max(map(len, WORLDS))
    for name, needs in WORLDS.items():
        print(f"{name:<{width}}  {needs.about}")
        print(f"{'':<{width}}  {', '.join(needs.all) or 'needs no package'}")
        if needs.all:
            where = environment_folder(name) if installed(name) else f"not installed (openrlhf worlds install {name})"
            print(f"{'':<{width}}  {where}")
    return 0
