"""BatchNorm whose statistics all workers share."""
