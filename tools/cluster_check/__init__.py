"""What only several GPUs can tell, on one node or several: tools/cluster_check.sh."""
