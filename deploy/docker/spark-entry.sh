#!/bin/bash
# What the image runs. Pods that Spark starts by itself (--master k8s://…) ask for one of two things,
# and say the rest in variables:
#
#   driver ARGUMENTS   the driver of --deploy-mode cluster, in its own pod
#   executor           one executor
#
# Anything else are arguments of spark-submit.
set -euo pipefail

case "${1:-}" in
driver)
    shift
    : "${SPARK_DRIVER_BIND_ADDRESS:?is set by Spark in pods that it starts; else leave out the word driver}"
    exec spark-submit --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
        --deploy-mode client "$@"
    ;;
executor)
    : "${SPARK_DRIVER_URL:?is set by Spark in pods that it starts; nobody else starts an executor so}"
    home=${SPARK_HOME:-$(find_spark_home.py)}
    # SPARK_JAVA_OPT_0, _1, …: an option each, in this order.
    options=()
    while read -r name; do
        options+=("${!name}")
    done < <(compgen -e SPARK_JAVA_OPT_ | sort -t _ -k 4 -n)
    classpath=${SPARK_CONF_DIR:-$home/conf}${HADOOP_CONF_DIR:+:$HADOOP_CONF_DIR}:$home/jars/*
    classpath+=${SPARK_EXTRA_CLASSPATH:+:$SPARK_EXTRA_CLASSPATH}
    classpath+=${SPARK_DIST_CLASSPATH:+:$SPARK_DIST_CLASSPATH}
    exec "${JAVA_HOME:+$JAVA_HOME/bin/}java" "${options[@]}" \
        "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" -cp "$classpath" \
        org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
        --driver-url "$SPARK_DRIVER_URL" \
        --executor-id "$SPARK_EXECUTOR_ID" \
        --cores "$SPARK_EXECUTOR_CORES" \
        --app-id "$SPARK_APPLICATION_ID" \
        --hostname "$SPARK_EXECUTOR_POD_IP" \
        --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
        --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
*)
    exec spark-submit "$@"
    ;;
esac
