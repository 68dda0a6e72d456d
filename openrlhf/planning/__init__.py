"""Plans of runs before anything is loaded: memory and time on machines that are here or not, and what is wrong here."""
