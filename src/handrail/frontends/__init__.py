"""How does a person or a program reach the kernel?"""
