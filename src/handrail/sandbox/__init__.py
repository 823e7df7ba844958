"""What does the operating system enforce?"""
