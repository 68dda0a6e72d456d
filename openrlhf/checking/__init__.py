"""`openrlhf check`: a user's reward or agent file tried on a few prompts, by the code that will run it in training."""
