"""What every service process needs: settings, logs, life-cycle, health."""
