"""Codecs: a page's layers in fewer bytes, for tiers whose device is slower than the codec.

Layers are encoded one by one, so that a single one can be read back alone. `base` has the contract, `registry` the
names and numbers; each codec has a file of its own. What is stored is not interpreted by anyone else: a checksum over
the stored bytes is the tier's business, and a codec survives any bytes all the same.
"""
