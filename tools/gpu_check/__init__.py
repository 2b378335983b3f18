"""What only a GPU can tell, checked on a machine with one GPU and no network: tools/gpu_check.sh."""
