"""What can a tool touch?"""
