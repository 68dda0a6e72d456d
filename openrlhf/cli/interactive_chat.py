"""A chat: an older command that is not here; it says which one does its work."""

from openrlhf.cli.main import refer

if __name__ == "__main__":
    raise SystemExit(refer("interactive_chat", called="interactive_chat"))
