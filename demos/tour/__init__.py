"""The tour: a scripted model at work on a small real repository, through the real kernel, watched and checked.

``python -m demos.tour``. The model's replies come from a script; everything else is what any agent
gets: the loop, the rules, the locks, the sandbox, the log. Afterwards each effect is looked up where it must have
happened (in the files, the processes, the log), never in what the model said.
"""
