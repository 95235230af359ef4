"""At home in the frameworks that people use: each is imported by its own name, and brings no other along."""
