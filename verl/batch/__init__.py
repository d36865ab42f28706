"""The implementation of `verl.protocol.DataProto`, by subject.

containers     the three containers; operations on columns and metadata
rows           operations on rows
padding        the setting for chunks of unequal size
serialization  tensors as plain containers
"""
