"""The pool: owned layers in memory that peers may map, and right, cheap reads of the layers that others own."""
