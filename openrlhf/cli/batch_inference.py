"""Answers in bulk: an older command that is not here; it says which one does its work."""

from openrlhf.cli.main import refer

if __name__ == "__main__":
    raise SystemExit(refer("batch_inference", called="batch_inference"))
