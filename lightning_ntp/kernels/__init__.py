"""How bytes move: packing of spans and the vocab-parallel cross-entropy. reference.py defines, the compiled versions follow."""
