"""Four doors: two scripted agents, an MCP client and a terminal edit one file at once, and the one that holds it is killed.

``python -m demos.doors``. Every door is a process of its own, as somebody would start it. Afterwards each
edit is looked up in the file and in the log: it is there, or it is reported why it is not.
"""
