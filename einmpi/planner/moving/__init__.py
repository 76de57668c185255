"""What moves between ranks: shares of labels, words along an edge, halos, bills of vertices."""
