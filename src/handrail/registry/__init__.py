"""Which tools are there?"""
