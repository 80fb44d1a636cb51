"""Tensors as bytes and back: the documented serdes, and the codecs of chunks that leave a process. Names are imported when first used."""
