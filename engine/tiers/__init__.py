"""What lies below the device: blocks in host memory and on disk, and their index in Redis."""
