"""Where is state kept?"""
