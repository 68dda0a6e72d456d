"""`openrlhf doctor COMMAND …`: what a training command will take, whether it fits, and what is wrong here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from openrlhf.config.fields import ConfigError
from openrlhf.utils import interrupts

if TYPE_CHECKING:
    from openrlhf.planning.command import Command

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """0: the run can start; 1: it cannot as it is; 2: the doctor was asked for something that it does not know."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not words or words[0] in ("-h", "--help"):
        parser.print_help()
        return 0 if words else USAGE_ERROR
    given, rest = parser.parse_known_args(words)
    from openrlhf.planning.command import read_command

    with interrupts.handled():
        try:
            if given.gpus and given.cluster:
                raise ConfigError("--gpus and --cluster both name machines: give one of them")
            return _run(given, read_command(rest))
        except ConfigError as error:
            for line in str(error).splitlines():
                print(f"openrlhf doctor: error: {line}", file=sys.stderr)
            return USAGE_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return interrupts.exit_status()


def _run(given: argparse.Namespace, command: Command) -> int:
    try:
        config = command.config()
    except ConfigError as error:  # what the command itself would say
        if given.json:
            problems = [{"kind": "settings", "text": line} for line in str(error).splitlines()]
            print(json.dumps({"starts": False, "problems": problems}, indent=2))
        for line in str(error).splitlines():
            print(f"{' '.join(command.front)}: error: {line}", file=sys.stderr)
        return 1

    # Seconds of imports, which a wrong flag need not wait for.
    from openrlhf.config.commands import RLConfig
    from openrlhf.models.loading import ModelLoadError, silence_progress_bars
    from openrlhf.planning.display import DoctorDisplay, as_values
    from openrlhf.planning.fit import fitted, planner
    from openrlhf.planning.hardware import machines_here, parse_cluster, parse_gpus
    from openrlhf.planning.machine import Finding, Status, look, look_at_data, look_at_model, look_at_reward
    from openrlhf.planning.plan import Expected, ModelReader

    silence_progress_bars()
    machines = parse_cluster(given.cluster) if given.cluster else parse_gpus(given.gpus) if given.gpus else None
    machines = machines or machines_here()
    findings: list[Finding] = []
    expected = Expected()
    if not given.plan_only:
        looked = look_at_data(config, must_be_here=machines.here)
        findings += looked.findings
        expected = looked.expected
        if isinstance(config, RLConfig) and not any(finding.status is Status.FAILURE for finding in findings):
            findings += look_at_reward(config)
    expected = expected._replace(
        prompt_tokens=given.prompt_tokens or expected.prompt_tokens,
        response_tokens=given.response_tokens,
        records=given.records or expected.records,
    )
    plan_of = planner(machines, expected, ModelReader())
    plan = None
    try:
        plan = plan_of(command)
        findings = [*look_at_model(config, plan), *findings]
    except ModelLoadError as error:
        remedy = "name a folder of this machine, a model of the Hub's cache, or one of planning/models.py"
        findings.insert(0, Finding(Status.FAILURE, "model", " ".join(str(error).split()), remedy))
    if not given.plan_only:
        findings = [*look(config, plan, machines=machines), *findings]
    failures = sum(finding.status is Status.FAILURE for finding in findings) + len(plan.problems if plan else ())
    warnings = sum(finding.status is Status.WARNING for finding in findings)
    starts = not failures
    found = fitted(command, machines, plan_of) if plan is not None and (given.fit or not plan.fits) else None
    if given.json:
        sought = plan is not None and (given.fit or not plan.fits)
        print(json.dumps(as_values(plan, findings, found, starts=starts, sought=sought), indent=2))
        return 0 if starts else 1
    display = DoctorDisplay(sys.stdout, explain=given.explain)
    if plan is not None:
        display.plan(plan)
    display.findings(findings)
    if plan is not None and not plan.fits:
        print()
        display.problems(plan)
        display.fit(found, asked=given.fit)
    elif found is not None:
        print("\nIt fits as it is:\n")
        print(found.command.lines())
    display.verdict(starts=starts, failures=failures, warnings=warnings)
    return 0 if starts else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf doctor",
        usage="openrlhf doctor [OPTIONS] COMMAND FLAGS   (such as: openrlhf doctor --gpus 8xH100 rl FLAGS)",
        description="Say before anything is loaded what a training command will take: which device holds what in which "
        "phase, the seconds of a step and the hours of the run; whether it fits, and the smallest change of flags that "
        "makes it fit. Then look at what is here: versions, GPUs, disk, limits, data and rewards. Exit status 0: the "
        "run can start; 1: it cannot as it is.",
        epilog="COMMAND is rl, sft, rm or dpo with its flags, or a whole command line: python -m "
        "openrlhf.cli.train_ppo_ray …, torchrun --nproc_per_node 8 -m openrlhf.cli.train_sft …. Options may also come "
        "after it. docs/doctor.md has the formulas, and what was measured beside them.",
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("-h", "--help", action="help", help="show this and exit")
    add(
        "--gpus",
        metavar="8xH100",
        help="plan for such a machine: A100-40, A100-80, H100, H200, B200, L40S, RTX4090, cpu",
    )
    add("--cluster", metavar="8x8xH200", help="plan for several machines with as many GPUs each")
    add("--fit", action="store_true", help="print the changed command, complete and ready to run")
    add("--explain", action="store_true", help="the formula behind every number, and every measured constant")
    add("--json", action="store_true", help="everything as JSON, bytes and seconds, for programs")
    add("--plan_only", action="store_true", help="do not look at this machine, the data and the rewards")
    add("--prompt_tokens", type=_count, metavar="N", help="of a prompt on average (default: of the data)")
    add(
        "--response_tokens",
        type=_count,
        metavar="N",
        help="of a response on average (default: as long as it may be)",
    )
    add("--records", type=_count, metavar="N", help="prompts or samples of the data (default: counted)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
