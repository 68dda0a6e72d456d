from openrlhf.utils.foreign_lines import filter_unhandled

# Also in processes that a library starts anew with our command as their main module, vLLM's, and before they import it.
filter_unhandled()
