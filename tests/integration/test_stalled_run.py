"""A run in which nothing happens any more: it ends, says what it waited for, and leaves everybody's stacks."""

from agent_files import HEAD, env
from patience import patience


def test_a_step_that_never_ends_in_this_process(cli, tmp_path):
    """In a host it would have a deadline of its own; in the process of the run (`--rollout.agent_hosts 0`) it has none."""
    file = tmp_path / "agent.py"
    file.write_text(HEAD + env("import asyncio; await asyncio.Event().wait()"))
    ran = cli(
        train__agent_func_path=file,
        train__stall_timeout=2,
        rollout__agent_hosts=0,
        rollout__step_timeout=1,
        rollout__max_new_tokens=3,
        data__max_len=24,
        reward__remote_url="none",
    )
    assert ran.rc == 1
    (error,) = ran.errors
    assert error.startswith("error: nothing has happened for 2 s (--train.stall_timeout 2): round 1: waiting ")
    assert "s for 4 of 4 prompts (0, 1, 2, 3): prompt 0 sample 0 in the user's code (agent.py)" in error
    stacks = ran.run_dir / "stacks-1.txt"
    assert error.endswith(f"stacks are in {stacks}")
    assert f'File "{file}", line 9, in step' in stacks.read_text()
    assert ran.seconds < patience(40)
