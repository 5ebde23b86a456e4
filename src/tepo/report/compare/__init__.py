"""`tepo compare`: objectives x seeds x tasks from one recipe, or from runs that are there."""
