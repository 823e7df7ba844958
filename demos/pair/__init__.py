"""Two agents: one reviews and may not write, the other mends, and they hand the work to each other over channels.

``python -m demos.pair``. Two scripted models on a real repository, through one kernel. Afterwards what came of it
is looked up in the repository, the channels, the conversations and the log, whatever the models said.
"""
