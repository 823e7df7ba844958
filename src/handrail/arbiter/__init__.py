"""How is one call carried out?"""
