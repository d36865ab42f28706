"""`reshard`: every rank receives the chunks of the parameters that it stores and lacks, and no others.

Training and rollout share the devices. Every rank has shards of the parameters in training, and stores slices of them
in the rollout engine, as with tensor parallelism. The way of a weight:

    plan.py   layouts of all ranks -> which box of which parameter goes from which rank to which, in which bucket
    sync.py   one rank's share of a bucket: chunks that it sends, keeps and receives; then per bucket:
                             shards --sends--> buffer --all-to-all--> buffer --receives--> stored tensors
                             shards --keeps-----------------------------------------> stored tensors

The plan is computed at the first push. The next bucket is packed while one is sent. After the first push and every
`check_every` versions, all parameters are gathered, and what a rank stores is compared with them bit for bit.
"""
