"""What may a model see, and how is a tool found?"""
