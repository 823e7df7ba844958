"""What does one conversation hold?"""
