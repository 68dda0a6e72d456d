"""`openrlhf prove`: a training command's own model, data and flags, held against definitions before the run begins."""
