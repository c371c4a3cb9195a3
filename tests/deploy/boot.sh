#!/bin/bash
# Boots systemd for one unit, in namespaces of its own: `unshare ... boot.sh WORK UNIT PROGRAM MODELS
# [DROP_IN SETTINGS]`.
#
# The root file system is this machine's, under an overlay that is gone afterwards; of its own units
# none is started. WORK is an empty folder, PROGRAM what stands at /opt/modelport/bin/modelport,
# SETTINGS a folder that stands at /etc/modelport.
set -eu
work=$1 unit=$2 program=$3 models=$4
mount --make-rprivate /
mount -t tmpfs none "$work"
mkdir "$work/upper" "$work/work" "$work/root"
cp -R "$models" "$work/models"
mount -t overlay none -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$work/root"
cd "$work/root"
mount -t proc none proc
mount -t sysfs none sys
mount -t cgroup2 none sys/fs/cgroup
mount --rbind /dev dev
for folder in run tmp usr/lib/systemd/system etc/systemd var/lib var/cache; do
    mount -t tmpfs none "$folder"
done
mkdir -p etc/systemd/system opt/modelport/bin var/lib/modelport
cp "$unit" etc/systemd/system/modelport.service
cp "$program" opt/modelport/bin/modelport
mv "$work/models" var/lib/modelport/models
if [ $# -eq 6 ]; then
    mkdir etc/systemd/system/modelport.service.d
    cp "$5" etc/systemd/system/modelport.service.d/
    cp -R "$6" etc/modelport
fi
for name in sysinit basic shutdown umount final local-fs network network-online multi-user; do
    printf '[Unit]\nDescription=%s\n' "$name" >"usr/lib/systemd/system/$name.target"
done
printf '[Manager]\nDefaultStandardOutput=inherit\nDefaultStandardError=inherit\n' \
    >etc/systemd/system.conf
mkdir .old
pivot_root . .old
umount --lazy /.old
# As container managers do: credentials are mounted in a namespace of their own, and reach the service by this.
mount --make-rshared /
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=modelport.service --show-status=no --log-target=console
